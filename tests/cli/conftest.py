"""A store directory on disk with known pages, and a runner of commands."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tierkv.cli.main import app
from tierkv.storage.format import PAGE_TAIL, PageInfo
from tierkv.storage.ssd import SsdTier
from tierkv.storage.types import PageWrite, WriteStatus

DESCRIPTION = {
    "format": "tierkv/1",
    "spec": {
        "groups": [
            {"name": "full", "dtype": "bfloat16"},
            {"name": "sliding", "dtype": "bfloat16"},
        ]
    },
    "weights": "revision-1",
    "adapter": "",
    "salt": "tenant-secret",
    "tp": [0, 1],
}


@dataclass(frozen=True)
class Result:
    """What a command printed and how it ended."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def run() -> Callable[..., Result]:
    """Run ``tierkv`` in this process."""

    def call(*arguments: object, input: str | None = None) -> Result:
        runner = CliRunner(env={"COLUMNS": "140", "TERM": "dumb", "NO_COLOR": "1"})
        result = runner.invoke(app, [str(a) for a in arguments], input=input)
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Result(result.exit_code, result.stdout, result.stderr)

    return call


@dataclass(frozen=True)
class Shelf:
    """A store directory, and pages to put into it: page ``i`` of chain ``a`` is ``a/i``."""

    path: Path
    payload_bytes: int = 64 * 1024
    page_tokens: int = 64
    capacity_bytes: int = 8 << 20
    created_s: int = 1_700_000_000

    @property
    def namespace(self) -> bytes:
        return hashlib.sha256(json.dumps(DESCRIPTION).encode()).digest()

    def key(self, name: str) -> bytes:
        return hashlib.sha256(name.encode()).digest()

    def payload(self, key: bytes) -> np.ndarray:
        seed = int.from_bytes(key[:8], "little")
        return np.random.default_rng(seed).integers(0, 256, self.payload_bytes, np.uint8)

    def chain(self, name: str, pages: int, *, group: int = 0, tail: int = 0) -> list[PageInfo]:
        """Return a chain of full pages, and a tail page of ``tail`` tokens."""
        infos: list[PageInfo] = []
        parent, end = self.key(f"root/{name}"), 0
        for page, tokens in enumerate([self.page_tokens] * pages + ([tail] if tail else [])):
            end += tokens
            infos.append(
                PageInfo(
                    key=self.key(f"{name}/{page}"),
                    namespace=self.namespace,
                    parent=parent,
                    group=group,
                    end_token=end,
                    num_tokens=tokens,
                    flags=PAGE_TAIL if tokens < self.page_tokens else 0,
                    created_s=self.created_s + page,
                )
            )
            parent = infos[-1].key
        return infos

    def open(self, **options: Any) -> SsdTier:
        return SsdTier.open(
            self.path,
            capacity_bytes=self.capacity_bytes,
            slot_payload_bytes=self.payload_bytes,
            namespaces={self.namespace: json.dumps(DESCRIPTION)},
            **options,
        )

    def put(self, tier: SsdTier, infos: Sequence[PageInfo]) -> None:
        """Write pages and wait until they are durable."""
        ticket = tier.put([PageWrite(info, self.payload(info.key)) for info in infos])
        assert set(ticket.wait(30) or []) == {WriteStatus.WRITTEN}
        assert tier.flush(30).ok

    def damage(self, name: str) -> None:
        """Flip a bit in the payload of one page, wherever the slabs hold it."""
        needle = self.payload(self.key(name))[:64].tobytes()
        for slab in sorted((self.path / "slabs").iterdir()):
            data = bytearray(slab.read_bytes())
            at = data.find(needle)
            if at >= 0:
                data[at + 5] ^= 4
                slab.write_bytes(data)
                return
        raise AssertionError(f"no slab holds {name}")


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    """A directory in which no store is yet."""
    return Shelf(tmp_path / "store")


@pytest.fixture
def filled(shelf: Shelf) -> Shelf:
    """A closed store: chain ``a`` (4 pages, a tail of 10), ``b`` (2), ``s`` of group 1 (3)."""
    with shelf.open() as tier:
        pages = [*shelf.chain("a", 4, tail=10), *shelf.chain("b", 2), *shelf.chain("s", 3, group=1)]
        shelf.put(tier, pages)
        used = {"b/1": (7, 500), "b/0": (3, 400)}
        tier.record_usage({shelf.key(n): (h, shelf.created_s + s) for n, (h, s) in used.items()})
    return shelf
