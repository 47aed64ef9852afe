"""GPU kernels, each beside its plain-PyTorch reference; installed as ``tierkv.kernels``.

A kernel and its reference stand in one file, named after what they do.  The reference is the
specification, and the path of CPU tensors; ``launch`` says how one or the other is chosen.
Importing this package imports neither torch nor Triton: its modules do.

The folder stands at the top level of the repository.  With the repository root on
``sys.path`` it is therefore importable as ``kernels``, a name that another package owns and
that Transformers looks for.  Two lines of defence keep the two apart: the version below is
older than any that Transformers accepts, so this folder never passes for that package, and
when that package is installed, importing ``kernels`` hands over to it.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

__all__: list[str] = []
__version__ = "0"


def _hand_over() -> None:
    """Replace this module by the installed package of the same name, if there is one."""
    root = Path(__file__).resolve().parent.parent
    elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() != root]
    spec = PathFinder.find_spec("kernels", elsewhere)
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["kernels"] = module  # the import system returns what it finds here
    spec.loader.exec_module(module)


if __name__ == "kernels":
    _hand_over()
