"""``tierkv clear``: remove everything in a store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tierkv.cli.output import JsonOption, console, counted, print_json
from tierkv.errors import InvalidInputError
from tierkv.units import format_bytes


def clear(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The store's directory.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove every page of a store and give its disk space back.

    The directory stays a store, ready for use.  Refuses a store in use and a directory that
    is not a store, and leaves files that are not the store's.
    """
    from tierkv.cli.directory import count_pages
    from tierkv.storage.clearing import clear_directory

    pages = count_pages(directory)
    if not yes:
        if as_json:
            raise InvalidInputError("clear --json does not ask; say --yes to remove all pages")
        typer.confirm(f"Remove {counted(pages, 'page')} from {directory}?", abort=True)
    report = clear_directory(directory)
    if as_json:
        removed = {"pages": pages, "slabs": report.slabs, "bytes": report.bytes}
        print_json({"directory": str(directory), "cleared": True, **removed})
    else:
        space = format_bytes(report.bytes)
        console().print(f"{counted(pages, 'page')} removed, {space} given back", markup=False)
