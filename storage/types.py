"""What goes into the SSD tier and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tierkv.errors import InvalidInputError
from tierkv.storage.aligned import ByteArray
from tierkv.storage.format import MAX_RANGES, PageInfo, check_info

Key = bytes  # "bytes" is also the name of a field below


class WriteStatus(StrEnum):
    """What became of a page that was put."""

    WRITTEN = "written"
    DUPLICATE = "duplicate"
    NO_SPACE = "no_space"
    FAILED = "failed"
    READ_ONLY = "read_only"
    CLOSED = "closed"
    QUEUE_FULL = "queue_full"


class ReadStatus(StrEnum):
    """What became of a page that was read.  Everything but ``HIT`` is a miss."""

    HIT = "hit"
    MISS = "miss"
    CORRUPT = "corrupt"
    ERROR = "error"
    TIMEOUT = "timeout"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class PageWrite:
    """A page to write.

    Attributes:
        info: what the header says of it.
        payload: its bytes, one-dimensional contiguous uint8; memory on a 4 KiB boundary with
            a length of whole 4 KiB is written without a copy.
        layer_bytes: length of a layer's range, of which the payload is a multiple; each range
            gets a checksum of its own.  0: one range.
    """

    info: PageInfo
    payload: ByteArray
    layer_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RangeRead:
    """A part of a page to read.

    Attributes:
        key: which page.
        page_bytes: size of the whole page; one of another size is a miss.
        offset: where in the page the part begins.
        destination: where it goes, of exactly its size; one-dimensional contiguous uint8.
    """

    key: bytes
    page_bytes: int
    offset: int
    destination: ByteArray


@dataclass(frozen=True, slots=True)
class FlushReport:
    """What a flush made durable.

    Attributes:
        pages: pages that are durable now.
        bytes: their bytes, before codecs.
        ok: everything that was put before is durable, or has reported why not.
        failed: keys of pages that could not be written since the last flush.
    """

    pages: int
    bytes: int
    ok: bool
    failed: list[Key]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What reading every page at rest found.

    Attributes:
        pages: pages checked.
        bad: pages that did not check out; ``bad_keys`` names them.
        bad_keys: their keys.
        unreadable: pages that an I/O error kept from being checked.
        repaired: bad pages that were dropped.
        index_mismatches: pages that the index and the memory disagree about.
        damaged_slabs: slab files that are missing or of the wrong size, by name.
        unknown_files: files in the directory that are not the tier's.
    """

    pages: int
    bad: int
    bad_keys: list[Key]
    unreadable: int
    repaired: int
    index_mismatches: int
    damaged_slabs: list[str]
    unknown_files: list[str]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong (unknown files are no fault)."""
        return not (self.bad or self.unreadable or self.index_mismatches or self.damaged_slabs)


def check_buffer(array: ByteArray, what: str) -> None:
    """Raise InvalidInputError unless ``array`` is one-dimensional contiguous uint8."""
    if getattr(array, "dtype", None) != "uint8" or array.ndim != 1 or not array.flags.c_contiguous:
        raise InvalidInputError(
            f"{what}: expected a one-dimensional contiguous uint8 array, got "
            f"{type(array).__name__} of dtype {getattr(array, 'dtype', None)} and "
            f"shape {getattr(array, 'shape', None)}"
        )


def check_range(read: RangeRead) -> None:
    """Raise InvalidInputError unless the part lies inside its page."""
    check_buffer(read.destination, "read destination")
    size = read.destination.nbytes
    if not 0 <= read.offset < read.offset + size <= read.page_bytes:
        raise InvalidInputError(
            f"read: bytes [{read.offset}, {read.offset + size}) are no part of a page of "
            f"{read.page_bytes} bytes"
        )


def check_page(page: PageWrite, slot_payload_bytes: int) -> None:
    """Raise InvalidInputError unless the page fits a slot and the format."""
    check_info(page.info)
    check_buffer(page.payload, "page payload")
    size = page.payload.nbytes
    if not 0 < size <= slot_payload_bytes:
        raise InvalidInputError(
            f"page payload: {size} bytes; a slot holds 1 to {slot_payload_bytes}"
        )
    step = page.layer_bytes
    if step < 0 or (step and size % step):
        raise InvalidInputError(f"layer_bytes: {step} does not divide the payload's {size} bytes")
    if step and size // step > MAX_RANGES:
        raise InvalidInputError(
            f"layer_bytes: {size // step} ranges; a header has room for {MAX_RANGES}"
        )
