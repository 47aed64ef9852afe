"""The golden stores: what earlier versions wrote must be read, from index and by scan."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash

from tierkv.storage.aligned import aligned_empty
from tierkv.storage.ssd import ReadStatus
from tierkv.storage.testing import TEST_NAMESPACE

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = sorted(p.name for p in GOLDEN.iterdir() if (p / "expected.json").exists())
SIZE = 8192
SLOT = SIZE + 4096


@pytest.fixture(params=VERSIONS)
def golden(request, fast_dir):
    """A copy of a golden store (opening changes one), and what it must hold."""
    expected = json.loads((GOLDEN / request.param / "expected.json").read_text())
    shutil.copytree(
        GOLDEN / request.param, fast_dir / "store", ignore=shutil.ignore_patterns("expected.json")
    )
    return fast_dir / "store", expected


@pytest.mark.parametrize("how", ["clean", "scan", "read only", "read only scan"])
def test_golden_pages_are_read(golden, open_tier, how):
    path, expected = golden
    if "scan" in how:
        (path / "clean").unlink()
    tier = open_tier(
        path,
        capacity_bytes=6 * SLOT,
        slot_payload_bytes=SIZE,
        slab_bytes=3 * SLOT,
        read_only="read only" in how,
    )
    assert tier.stats().clean_open is ("scan" not in how)
    infos = {info.key.hex(): (info, hits, used) for info, hits, used in tier.pages()}
    assert infos.keys() == expected.keys()
    for key, page in expected.items():
        info, hits, used = infos[key]
        assert info.namespace == TEST_NAMESPACE
        assert info.parent.hex() == page["parent"]
        for name in ("group", "end_token", "num_tokens", "flags", "created_s"):
            assert getattr(info, name) == page[name], name
        if "scan" not in how:
            assert (hits, used) == (page["number"], 1_700_000_100)
        out = aligned_empty(page["bytes"])
        assert tier.read([info.key], [out], namespace=TEST_NAMESPACE) == [ReadStatus.HIT]
        wanted = (np.arange(page["bytes"], dtype=np.uint64) * (page["number"] + 3)) % 251
        assert np.array_equal(out, wanted.astype(np.uint8))
    assert tier.namespaces == {TEST_NAMESPACE: '{"weights":"golden"}'}
    assert tier.verify().ok


def test_version_1_by_hand():
    """Decode a slot with nothing but docs/format.md at hand."""
    slab = (GOLDEN / "v1" / "slabs" / "0000").read_bytes()
    meta = json.loads((GOLDEN / "v1" / "meta").read_bytes().split(b"\n")[0])
    assert len(slab) == 3 * SLOT
    header = slab[:4096]
    assert header[0:8] == b"TKVSLOT\x01"
    version, flags, header_bytes = struct.unpack_from("<HHI", header, 8)
    assert (version, flags, header_bytes) == (1, 0, 4096)
    assert header[16:32].hex() == meta["slabs"][0]["uuid"]
    assert header[32:48].hex() == meta["fingerprint"]
    assert header[112:144] == TEST_NAMESPACE
    seq, raw, stored, end_token, created = struct.unpack_from("<5Q", header, 144)
    assert (seq, raw, stored, end_token, created) == (1, SIZE, SIZE, 64, 1_700_000_000)
    group, num_tokens, slot = struct.unpack_from("<3I", header, 184)
    assert (group, num_tokens, slot) == (0, 64, 0)
    assert header[196] == 0, "raw"
    layer_bytes, num_ranges = struct.unpack_from("<QI", header, 200)
    assert (layer_bytes, num_ranges) == (SIZE // 4, 4)
    ranges = struct.unpack_from("<4Q", header, 256)
    payload = slab[4096 : 4096 + SIZE]
    for n, value in enumerate(ranges):
        assert value == xxhash.xxh3_64_intdigest(payload[n * 2048 : (n + 1) * 2048])
    assert header[224:240] == xxhash.xxh3_128_digest(header[256:288])
    assert not any(header[288:4088])
    assert struct.unpack_from("<Q", header, 4088)[0] == xxhash.xxh3_64_intdigest(header[:4088])
