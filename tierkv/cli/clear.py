"""``tierkv clear``: remove everything in a store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tierkv.cli.output import JsonOption, console, print_json
from tierkv.errors import InvalidInputError


def clear(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The store's directory.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove every page of a store, which stays a store, ready for use.

    Refuses a store in use and a directory that is not a store.
    """
    from tierkv.cli.directory import clear_pages, count_pages

    pages = count_pages(directory)
    if not yes:
        if as_json:
            raise InvalidInputError("clear --json does not ask; say --yes to remove all pages")
        typer.confirm(f"Remove all {pages} pages in {directory}?", abort=True)
    clear_pages(directory)
    if as_json:
        print_json({"directory": str(directory), "cleared": True, "pages": pages})
    else:
        console().print(f"{pages} pages removed", markup=False)
