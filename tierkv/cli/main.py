"""The ``tierkv`` command: its options and the list of commands."""

from __future__ import annotations

from typing import Annotated

import typer

import tierkv
from tierkv.cli.clear import clear
from tierkv.cli.demo_command import demo
from tierkv.cli.errors import ErrorReportingGroup
from tierkv.cli.ls import ls
from tierkv.cli.stat import stat
from tierkv.cli.verify import verify

app = typer.Typer(
    name="tierkv",
    cls=ErrorReportingGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit status: 0 all well; 1 problems found; 2 wrong usage or a failure to run.",
)
for command in (stat, ls, verify, clear, demo):
    app.command()(command)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"tierkv {tierkv.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Look into a tierkv store: the attention state of language models, kept in tiers.

    A store is a directory.  stat and ls answer for a store that another process has open,
    without disturbing it.
    """


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
