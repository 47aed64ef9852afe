"""Parts of pages, read and checked alone: exactly those bytes, or a miss."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest
from small_tier import CORRUPT, ERROR, HIT, MISS, SIZE, SLOT, put

from tierkv.errors import InvalidInputError
from tierkv.storage.aligned import aligned_empty
from tierkv.storage.ssd import RangeRead, ReadStatus
from tierkv.storage.testing import TEST_NAMESPACE, Gate, make_page, page_bytes, page_key

LAYER = 4096
LAYERS = SIZE // LAYER


def wanted(number, offset, size, *, page_size=SIZE, out=None):
    out = aligned_empty(size) if out is None else out
    return RangeRead(page_key(number), page_size, offset, out)


def read_parts(tier, number, parts, *, namespace=TEST_NAMESPACE, size=SIZE):
    """Read (offset, size) parts of a page, one batch each; return the statuses."""
    reads = [wanted(number, offset, count, page_size=size) for offset, count in parts]
    tickets = tier.submit_ranges([[read] for read in reads], namespace=namespace)
    statuses = [ticket.wait()[0] for ticket in tickets]
    page = page_bytes(number, size)
    for read, status in zip(reads, statuses, strict=True):
        if status is HIT:
            stop = read.offset + read.destination.nbytes
            assert np.array_equal(read.destination, page[read.offset : stop])
    return statuses


def flip(tier, number, offset):
    """Change a byte of a page at rest, counted from the beginning of its slot."""
    location, _ = tier._core.catalog.pin(page_key(number), None)
    tier._core.catalog.unpin(location)
    with open(tier._core.layout.slab(location.slab), "r+b", buffering=0) as file:
        at = location.slot * SLOT + offset
        byte = os.pread(file.fileno(), 1, at)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 8]), at)


def all_parts():
    return [
        (first * LAYER, (last - first) * LAYER)
        for first in range(LAYERS)
        for last in range(first + 1, LAYERS + 1)
    ]


def test_every_run_of_layers_is_read_exactly(tier):
    put(tier, 1, 2, layer_bytes=LAYER)
    before = tier.stats()
    assert read_parts(tier, 2, all_parts()) == [HIT] * len(all_parts())
    stats = tier.stats()
    assert stats.lookups - before.lookups == stats.hits == len(all_parts())
    read_bytes = sum(size for _, size in all_parts())
    assert stats.logical_bytes_read == read_bytes
    headers = stats.device_bytes_read - read_bytes
    assert 4096 <= headers <= 5 * 4096  # by the parts that began before one knew the header


def test_the_header_is_read_with_the_first_part_only(open_tier, backend):
    tier = open_tier(backend=backend, io_threads=1)  # the parts of a batch one after the other
    put(tier, 1, layer_bytes=LAYER)
    out = aligned_empty(SIZE)
    calls = backend.calls["preadv"]
    parts = [wanted(1, at, LAYER, out=out[at : at + LAYER]) for at in range(0, SIZE, LAYER)]
    (ticket,) = tier.submit_ranges([parts])
    assert ticket.wait() == [HIT] * LAYERS
    assert backend.calls["preadv"] - calls == LAYERS  # header and first layer in one call
    assert tier.stats().device_bytes_read == SLOT
    assert np.array_equal(out, page_bytes(1, SIZE))


def test_damage_is_noticed_by_the_parts_that_hold_it_and_by_no_other(open_tier):
    writer = open_tier()
    put(writer, 1, layer_bytes=LAYER)
    writer.close()
    tier = open_tier(writer.path, read_only=True)  # it drops nothing, so each can be tried
    for layer in range(LAYERS):
        for at in (0, 1234, LAYER - 1):
            offset = 4096 + layer * LAYER + at
            flip(tier, 1, offset)
            expected = [
                CORRUPT if low <= layer * LAYER < low + size else HIT for low, size in all_parts()
            ]
            assert read_parts(tier, 1, all_parts()) == expected
            flip(tier, 1, offset)
    flip(tier, 1, 100)  # in the header
    assert read_parts(tier, 1, [(LAYER, LAYER)]) == [CORRUPT]
    flip(tier, 1, 100)
    assert read_parts(tier, 1, all_parts()) == [HIT] * len(all_parts())


def test_a_damaged_part_drops_the_whole_page(tier):
    put(tier, 1, layer_bytes=LAYER)
    flip(tier, 1, 4096 + 2 * LAYER)
    assert read_parts(tier, 1, [(0, LAYER), (2 * LAYER, LAYER)]) == [HIT, CORRUPT]
    assert tier.take_removed() == [page_key(1)]
    assert read_parts(tier, 1, [(0, LAYER)]) == [MISS]
    assert tier.stats().checksum_payload == 1


def test_another_namespace_size_or_key_is_a_miss(tier):
    put(tier, 1, layer_bytes=LAYER)
    assert read_parts(tier, 1, [(0, LAYER)], namespace=bytes(32)) == [MISS]
    assert read_parts(tier, 9, [(0, LAYER)]) == [MISS]
    (ticket,) = tier.submit_ranges([[wanted(1, 0, LAYER, page_size=2 * SIZE)]])
    assert ticket.wait() == [MISS]
    assert tier.stats().fingerprint_mismatch == 2


def test_a_slot_with_another_page_in_it_is_a_miss(tier):
    put(tier, 1, 2, layer_bytes=LAYER)
    with open(tier._core.layout.slab(0), "r+b", buffering=0) as file:
        pages = [os.pread(file.fileno(), SLOT, number * SLOT) for number in (0, 1)]
        os.pwrite(file.fileno(), pages[1] + pages[0], 0)
    assert read_parts(tier, 1, [(0, LAYER), (LAYER, LAYER)])[0] is CORRUPT
    assert tier.stats().stale_slots >= 1


@pytest.mark.parametrize(
    ("offset", "size"), [(-4096, 4096), (0, 0), (0, SIZE + 4096), (SIZE, 4096)]
)
def test_parts_outside_their_page_are_refused(tier, offset, size):
    put(tier, 1, layer_bytes=LAYER)
    with pytest.raises(InvalidInputError, match="no part of a page"):
        tier.submit_ranges([[wanted(1, 0, LAYER)], [wanted(1, offset, size)]])
    assert tier.stats().reads_in_flight == 0


@pytest.mark.parametrize("layer_bytes", [0, 1024, LAYER])
def test_parts_that_no_checksums_cover_are_cut_out_of_the_whole_page(tier, layer_bytes):
    """Odd offsets, and layers that are no multiple of what the device transfers."""
    put(tier, 1, layer_bytes=layer_bytes)
    parts = [(1024, 1024), (3072, 2048), (100, 5000), (SIZE - 1, 1), (0, SIZE)]
    assert read_parts(tier, 1, parts) == [HIT] * len(parts)
    flip(tier, 1, 4096 + 3000)
    covered = layer_bytes == 1024
    assert read_parts(tier, 1, [(3072, 2048)]) == [HIT if covered else CORRUPT]


def test_compressed_pages_are_read_whole(open_tier):
    tier = open_tier(codec="zstd")
    loose = make_page(1, SIZE, layer_bytes=LAYER)
    loose.payload[LAYER:] = 7
    tier.put([loose, make_page(2, SIZE, layer_bytes=LAYER)]).wait(20)
    assert tier.in_ranges([page_key(n) for n in (1, 2, 3)]) == [False, True, False]
    part = wanted(1, LAYER, LAYER)
    (ticket,) = tier.submit_ranges([[part]], namespace=TEST_NAMESPACE)
    assert ticket.wait() == [HIT]
    assert (part.destination == 7).all()
    assert read_parts(tier, 2, [(LAYER, LAYER)]) == [HIT]


def test_short_reads_are_completed_and_flipped_bits_read_again(tier, backend):
    put(tier, 1, layer_bytes=LAYER)
    backend.inject("preadv", "short", times=2)
    assert read_parts(tier, 1, [(LAYER, 2 * LAYER)]) == [HIT]
    for skip in (0, 1):  # the header, then the part
        backend.inject("preadv", "flip", skip=skip)
        assert read_parts(tier, 1, [(LAYER, LAYER)]) == [HIT]
        backend.clear()
    assert tier.stats().retry_reads == 2
    assert tier.stats().corrupt == 0


def test_errors_are_tried_again_then_misses_then_quarantine(tier, backend):
    put(tier, 1, layer_bytes=LAYER)
    backend.inject("preadv", errno.EIO)
    assert read_parts(tier, 1, [(0, LAYER)]) == [HIT]
    backend.inject("preadv", errno.EIO, times=None)
    statuses = [read_parts(tier, 1, [(0, LAYER)])[0] for _ in range(4)]
    assert statuses == [ERROR, ERROR, ERROR, MISS]
    assert tier.stats().quarantined == 1


def test_a_hanging_part_times_out_and_the_parts_behind_it_are_skipped(open_tier, backend):
    tier = open_tier(backend=backend, io_threads=1)
    put(tier, 1, 2, layer_bytes=LAYER)
    gate = Gate()
    backend.inject("preadv", gate)
    first, second = tier.submit_ranges([[wanted(1, 0, LAYER)], [wanted(2, 0, LAYER)]])
    assert gate.reached.wait(20)
    assert not first.wait_settled(0.01)
    assert first.wait(0.0) == second.wait(0.0) == [ReadStatus.TIMEOUT]
    assert not first.settled()
    calls = backend.calls["preadv"]
    gate.opened.set()
    assert first.wait_settled(20)
    assert second.wait_settled(20)
    assert backend.calls["preadv"] == calls
    assert read_parts(tier, 1, [(0, LAYER)]) == [HIT]
    tier.check()
