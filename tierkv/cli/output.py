"""What all commands print with: JSON, tables, ages and one-line errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_PIPE_COLUMNS = 200

JsonOption = Annotated[
    bool, typer.Option("--json", help="Print JSON instead of tables.", show_default=False)
]


def console(*, stderr: bool = False) -> Console:
    """Return a console on the present stdout or stderr.

    Output that goes into a file or another program is not cut to a terminal's width.
    """
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, width=None if stream.isatty() else _PIPE_COLUMNS)


def print_json(data: Any) -> None:
    """Print data as indented JSON."""
    json.dump(data, sys.stdout, indent=2)
    sys.stdout.write("\n")


def print_error(error: BaseException) -> None:
    """Print an error as one message on stderr."""
    message = str(error) or type(error).__name__
    console(stderr=True).print("error:", message, style="red", markup=False, soft_wrap=True)


def table(*columns: str, title: str | None = None, right: Iterable[str] = ()) -> Table:
    """Return an empty table with the named columns.

    Args:
        columns: the headings.
        title: printed above.
        right: headings whose column is aligned to the right (numbers).
    """
    from rich.table import Table

    numeric = set(right)
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in numeric else "left", no_wrap=True)
    return made


def counted(count: int, thing: str) -> str:
    """Return a count and what it counts: ``1 page``, ``2 pages``."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def format_age(seconds: float) -> str:
    """Return a duration with one unit: ``12s``, ``3m``, ``5h``, ``9d``."""
    if seconds < 0:  # written by a machine whose clock was ahead
        return "0s"
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{int(seconds)}s"
