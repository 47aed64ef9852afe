"""What installing and importing the package promises."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tierkv

ROOT = Path(__file__).resolve().parent.parent


def run_python(code: str, *, cwd: Path, path: list[Path] | None = None) -> str:
    """Run code in a fresh interpreter and return what it printed."""
    prefix = f"import sys; sys.path[:0] = {[str(entry) for entry in path or []]}\n"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", prefix + code],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def fake_kernels_package(folder: Path) -> Path:
    """Write a stand-in for the package that owns the name ``kernels``."""
    package = folder / "kernels"
    package.mkdir(parents=True)
    package.joinpath("__init__.py").write_text(
        "from kernels.inner import get_kernel\n__version__ = '0.18.2'\n"
    )
    package.joinpath("inner.py").write_text("def get_kernel():\n    return 'the real one'\n")
    return folder


@pytest.mark.parametrize("folder", ["repository", "elsewhere"])
def test_storage_and_kernels_are_subpackages_from_any_folder(folder: str, tmp_path: Path) -> None:
    cwd = ROOT if folder == "repository" else tmp_path
    code = (
        "import tierkv.storage, tierkv.kernels\n"
        "print(tierkv.storage.__name__, tierkv.kernels.__name__, 'kernels' in sys.modules)"
    )
    assert run_python(code, cwd=cwd) == "tierkv.storage tierkv.kernels False"


@pytest.mark.parametrize(
    "module",
    ["tierkv", "tierkv.storage.ssd", "tierkv.storage.arena", "tierkv.live", "tierkv.cli.main"],
)
def test_status_and_storage_import_no_torch(module: str, tmp_path: Path) -> None:
    code = f"import {module}\nprint(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    assert run_python(code, cwd=tmp_path) == "[]"


def test_transformers_does_not_take_our_folder_for_the_kernels_package() -> None:
    pytest.importorskip("transformers")
    code = (
        "import kernels\n"
        "from transformers.utils.import_utils import is_kernels_available\n"
        "print(kernels.__file__, hasattr(kernels, 'get_kernel'), is_kernels_available())"
    )
    expected = f"{ROOT / 'kernels' / '__init__.py'} False False"
    assert run_python(code, cwd=ROOT, path=[ROOT]) == expected


def test_our_kernels_folder_is_older_than_what_any_transformers_accepts() -> None:
    # Some releases compare the version without asking whether there is one, and would crash
    # on a package that has none.
    version = pytest.importorskip("packaging.version")
    code = "import kernels; print(kernels.__version__)"
    assert version.parse(run_python(code, cwd=ROOT, path=[ROOT])) < version.parse("0.0.1")


def test_an_installed_kernels_package_is_not_shadowed_by_our_folder(tmp_path: Path) -> None:
    installed = fake_kernels_package(tmp_path / "installed")
    code = (
        f"sys.path.append({str(installed)!r})\n"
        "from kernels import get_kernel\n"
        "import kernels, tierkv.kernels\n"
        "print(get_kernel(), kernels.__version__, tierkv.kernels.__version__)"
    )
    assert run_python(code, cwd=ROOT, path=[ROOT]) == "the real one 0.18.2 0"


def test_every_public_name_resolves() -> None:
    for name in tierkv.__all__:
        assert getattr(tierkv, name) is not None, name
    assert set(tierkv.__all__) <= set(dir(tierkv))


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Stoer'"):
        _ = tierkv.Stoer


def test_version_is_the_distributions() -> None:
    assert importlib.metadata.version("tierkv-store") == tierkv.__version__


def test_typed_marker_is_part_of_the_package() -> None:
    assert Path(tierkv.__file__).with_name("py.typed").exists()


def test_every_requirement_is_pinned_in_the_constraints() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert pins["torch"] == "2.13.0"
    required = importlib.metadata.requires("tierkv-store") or []
    names = {re.split(r"[^A-Za-z0-9_.-]", line)[0].lower() for line in required}
    assert names - {name.lower() for name in pins} == set()
