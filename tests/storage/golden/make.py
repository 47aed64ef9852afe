"""Write a golden store of the current format: ``python make.py v1``.  For new versions only."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np

from tierkv.storage.aligned import aligned_empty
from tierkv.storage.format import PAGE_TAIL
from tierkv.storage.ssd import PageWrite, SsdTier
from tierkv.storage.testing import TEST_NAMESPACE, make_page, page_key

SIZE = 8192
SLOT = SIZE + 4096


def sawtooth(size: int, number: int) -> np.ndarray:
    """Return bytes that any language can recompute: (i * (number + 3)) mod 251."""
    out = aligned_empty(size)
    out[:] = (np.arange(size, dtype=np.uint64) * (number + 3)) % 251
    return out


def main() -> None:
    """Write the store and what it holds."""
    target = Path(__file__).parent / sys.argv[1]
    shutil.rmtree(target, ignore_errors=True)
    names = {TEST_NAMESPACE: '{"weights":"golden"}'}
    expected = {}
    for codec, numbers in (("raw", range(3)), ("zstd", range(3, 5))):
        with SsdTier.open(
            target,
            capacity_bytes=6 * SLOT,
            slot_payload_bytes=SIZE,
            slab_bytes=3 * SLOT,
            codec=codec,
            namespaces=names,
        ) as tier:
            for n in numbers:
                size = SIZE - 100 * n
                info = make_page(
                    n,
                    1,
                    parent=page_key(n - 1) if n else bytes(32),
                    group=n % 2,
                    end_token=(n + 1) * 64,
                    num_tokens=64 - n,
                    flags=PAGE_TAIL if n == 4 else 0,
                    created_s=1_700_000_000 + n,
                ).info
                layer = size // 4 if size % 4 == 0 else 0
                tier.put([PageWrite(info, sawtooth(size, n), layer)]).wait()
                expected[info.key.hex()] = {
                    "number": n,
                    "bytes": size,
                    "parent": info.parent.hex(),
                    "group": info.group,
                    "end_token": info.end_token,
                    "num_tokens": info.num_tokens,
                    "flags": info.flags,
                    "created_s": info.created_s,
                }
            tier.record_usage({page_key(n): (n, 1_700_000_100) for n in numbers})
    (target / "index" / "lock.mdb").unlink()
    (target / "lock").unlink()
    (target / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
