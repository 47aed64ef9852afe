"""What is asked of a slot, and what may be found there instead."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from tierkv.storage.aligned import ByteArray, is_direct
from tierkv.storage.codec import RAW
from tierkv.storage.columns import Location
from tierkv.storage.format import HEADER_BYTES, SlotHeader, hash_ranges
from tierkv.storage.layout import SlabMeta
from tierkv.storage.types import PageWrite


class Fault(StrEnum):
    """Why a slot's contents are not the page that was asked for."""

    HEADER = "header"  # the header does not match its own hash, or the file ends early
    STALE = "stale"  # a valid header of another page, write, slot, slab or store
    PAYLOAD = "payload"  # the payload does not match the hashes in a valid header
    TORN = "torn"  # likewise, and its end is among what does not match


class SlotRead(NamedTuple):
    """What reading a slot gave; ``fault`` None means the destination holds the page."""

    fault: Fault | None
    device_bytes: int
    reread: bool


class Head:
    """The header of a page that is read in parts, once one of them has found it good."""

    __slots__ = ("header",)

    def __init__(self) -> None:
        self.header: SlotHeader | None = None


class Part(NamedTuple):
    """Where a part of a page begins, and what the parts of that page share."""

    offset: int
    head: Head


class Wanted(NamedTuple):
    """A page to read, or a part: what its slot must hold, and where it goes (exactly its size)."""

    key: bytes
    namespace: bytes | None
    location: Location
    out: ByteArray
    part: Part | None = None


class Placed(NamedTuple):
    """A page to write, and its place."""

    page: PageWrite
    slot: int
    seq: int
    durable_seq: int


def follows(slab: SlabMeta, before: Wanted, wanted: Wanted) -> bool:
    """Whether two pages can be read in one call: adjacent, raw, whole slots, aligned memory."""
    payload = slab.slot_bytes - HEADER_BYTES
    return (
        wanted.part is before.part is None
        and wanted.location.slab == before.location.slab
        and wanted.location.slot == before.location.slot + 1
        and wanted.location.stored_bytes == payload == before.location.stored_bytes
        and wanted.out.nbytes == payload == before.out.nbytes
        and is_direct(wanted.out)
        and is_direct(before.out)
    )


def is_cut_at(header: SlotHeader, offset: int, size: int) -> bool:
    """Whether a part consists of ranges that have checksums of their own."""
    step = header.layer_bytes or header.raw_bytes
    return header.codec == RAW and offset % step == 0 and size % step == 0


def compare(header: SlotHeader, raw: ByteArray, offset: int = 0) -> Fault | None:
    """Compare a page, or a part that is cut at the ranges, with the hashes in its header."""
    step = header.layer_bytes or header.raw_bytes
    first = offset // step
    right = header.ranges[first : first + raw.nbytes // step]
    actual = hash_ranges(raw, step)
    if actual == right:
        return None
    at_end = first + len(right) == len(header.ranges)
    return Fault.TORN if at_end and actual[-1] != right[-1] else Fault.PAYLOAD
