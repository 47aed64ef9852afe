"""``tierkv demo``: a real model whose conversations move through all tiers and come back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    model: Annotated[
        str,
        typer.Option(help="smollm2, gemma3, a model's folder or a hub name."),
    ] = "smollm2",
    conversations: Annotated[int, typer.Option(min=1, help="Conversations, interleaved.")] = 3,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each conversation.")] = 3,
    doc_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of the document each conversation starts with.")
    ] = 768,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens generated in a turn.")] = 8,
    device: Annotated[str, typer.Option(help="Bytes of the device tier.")] = "56MiB",
    host: Annotated[str, typer.Option(help="Bytes of the host tier.")] = "32MiB",
    disk: Annotated[str, typer.Option(help="Bytes of the disk tier.")] = "1GiB",
    directory: Annotated[
        Path | None,
        typer.Option(
            "--directory", "-d", help="Where the store lives; default: ./demo-store, emptied first."
        ),
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the result as JSON.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Chooses the documents and questions.")] = 0,
) -> None:
    """Hold several long conversations with a real model, through all tiers and a restart.

    The budgets are small on purpose, so that pages are pushed out of the device to host
    memory and disk.  Every turn is computed a second time without a cache; the exit status
    is 1 if any token differs.
    """
    from tierkv.cli.demo import run_demo

    raise typer.Exit(
        run_demo(
            model=model,
            conversations=conversations,
            turns=turns,
            doc_tokens=doc_tokens,
            new_tokens=new_tokens,
            device=device,
            host=host,
            disk=disk,
            directory=directory,
            json_path=json_path,
            seed=seed,
        )
    )
