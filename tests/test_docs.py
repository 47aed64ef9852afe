"""The documents name things that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FAULTS = ROOT / "docs" / "faults.md"
TEST_NAME = re.compile(r"`(tests/[\w/]+\.py)::(\w+)(?:::(\w+))?`")


def fault_rows() -> list[str]:
    """Return the rows of all tables in docs/faults.md, headings left out."""
    lines = FAULTS.read_text().splitlines()
    rows = [line for line in lines if line.startswith("|") and not set(line) <= set("|-: ")]
    return [row for row in rows if not row.startswith("| fault |")]


@cache
def defined_names(path: Path) -> frozenset[str]:
    """Return functions, classes and assigned names of a test file, methods included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(names)


def test_the_fault_list_has_rows() -> None:
    assert len(fault_rows()) >= 20


@pytest.mark.parametrize("row", fault_rows(), ids=lambda row: row.split("|")[1].strip()[:40])
def test_each_fault_names_a_test_that_exists(row: str) -> None:
    found = TEST_NAME.findall(row)
    assert found, f"no test is named in: {row}"
    for file, *names in found:
        path = ROOT / file
        assert path.exists(), f"{file} does not exist; named in: {row}"
        for name in filter(None, names):
            assert name in defined_names(path), f"{file} has no {name}; named in: {row}"


DOCUMENTS = [
    *("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "benchmarks/RESULTS.md"),
    *("docs/async.md", "docs/cli.md", "docs/engines.md", "docs/format.md"),
]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_that_documents_point_to_exist(name: str) -> None:
    document = ROOT / name
    text = document.read_text()
    targets = re.findall(r"\]\(([^)#\s]+)\)", text)
    for target in targets:
        if "://" not in target:
            assert (document.parent / target).exists(), f"{name} points to {target}"
