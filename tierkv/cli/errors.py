"""How errors leave the command line: one clear message and exit status 2."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from tierkv.cli.output import print_error
from tierkv.errors import TierKVError

EXIT_PROBLEMS = 1
EXIT_ERROR = 2


class ErrorReportingGroup(TyperGroup):
    """The group of all commands, which turns known errors into a message."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command; known errors end the process with status 2 and no traceback."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            # Some versions of Typer put the kind of the exception in front of what is wrong.
            error.message = error.message.removeprefix("Value error, ")
            raise
        except BrokenPipeError:
            raise  # the reader of our output has gone: not an error of ours
        except (TierKVError, OSError) as error:
            print_error(error)
            raise typer.Exit(EXIT_ERROR) from None
