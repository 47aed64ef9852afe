"""Dependencies point one way, and the control plane stays free of what makes it untestable."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LEAVES = {"tierkv.errors", "tierkv.units", "tierkv.tiers", "tierkv.stats", "tierkv.events"}

# What each part may import of ours (itself always).
MAY_IMPORT = {
    "kernels": LEAVES,
    "storage": LEAVES,
    "tierkv/identity": LEAVES,
    "tierkv/control_plane": LEAVES | {"tierkv.identity"},
    "tierkv/devices": LEAVES,
    "tierkv/data_plane": LEAVES
    | {"tierkv.identity", "tierkv.control_plane", "tierkv.devices", "tierkv.storage"},
    "tierkv/attached": LEAVES
    | {
        "tierkv.identity",
        "tierkv.control_plane",
        "tierkv.devices",
        "tierkv.storage",
        "tierkv.data_plane",
    },
    "tierkv/aio": LEAVES
    | {
        "tierkv.identity",
        "tierkv.devices",
        "tierkv.data_plane",
        "tierkv.store",
        "tierkv.sequence",
        "tierkv.attached",
        "tierkv.integrations",
    },
}
# Waits, clocks and torch make decisions depend on the machine.
KEPT_OUT = {
    "tierkv/control_plane": {"torch", "threading", "time", "os", "io", "random", "asyncio"},
    "tierkv/identity": {"threading", "random", "asyncio"},
    "storage": {"torch"},
}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_parts_import_only_what_lies_below(part):
    own = "tierkv." + part.removeprefix("tierkv/").replace("/", ".")
    allowed = MAY_IMPORT[part] | {own}
    for path in sorted((ROOT / part).rglob("*.py")):
        for name in imports(path):
            if name.split(".")[0] == "tierkv":
                assert any(name == a or name.startswith(a + ".") for a in allowed), (
                    f"{path.relative_to(ROOT)} imports {name}"
                )


@pytest.mark.parametrize("part", KEPT_OUT)
def test_parts_stay_free_of(part):
    for path in sorted((ROOT / part).rglob("*.py")):
        top = {name.split(".")[0] for name in imports(path)}
        assert not top & KEPT_OUT[part], f"{path.relative_to(ROOT)}: {top & KEPT_OUT[part]}"


def test_files_stay_small():
    long = {
        str(path.relative_to(ROOT)): lines
        for part in ("tierkv", "storage", "kernels")
        for path in (ROOT / part).rglob("*.py")
        if (lines := len(path.read_text().splitlines())) > 400
    }
    assert not long
