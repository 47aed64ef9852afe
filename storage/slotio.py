"""Writing pages into slots and reading them back, every byte checked.

Pages in adjacent slots go in one system call where their memory allows it: small pages
would otherwise spend more time in calls than in transfers.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import xxhash

from tierkv.storage.aligned import ALIGNMENT, ByteArray, aligned_empty, is_direct, round_up
from tierkv.storage.backend import IOBackend, transfer_all
from tierkv.storage.codec import RAW, Codec, codecs_by_id
from tierkv.storage.format import (
    HEADER_BYTES,
    IndexRecord,
    SlotHeader,
    decode_header,
    encode_header,
    hash_page,
    hash_ranges,
    record_of,
)
from tierkv.storage.layout import SlabMeta
from tierkv.storage.slabs import SlabFiles
from tierkv.storage.wanted import Fault, Part, Placed, SlotRead, Wanted, compare, is_cut_at
from tierkv.storage.workers import Turns

Turn = AbstractContextManager[None]
_AT_ONCE: Turn = nullcontext()

MAX_RUN = 64  # pages in one system call; each is two buffers, and the kernel takes 1024


class SlotIO:
    """Slot reads and writes of one store.  Thread-safe: scratch memory is per thread."""

    def __init__(self, files: SlabFiles, backend: IOBackend, codec: Codec, depth: int) -> None:
        self._files = files
        self._write_turns = Turns(depth)
        self._backend = backend
        self._codec = codec
        self._codecs = codecs_by_id()
        self._fingerprint = files.fingerprint
        self._local = threading.local()

    # -- writing -------------------------------------------------------------------------

    def write(self, slab: SlabMeta, run: Sequence[Placed]) -> tuple[list[IndexRecord], int]:
        """Write pages into adjacent slots, and return their records and the bytes sent.

        Nothing is durable before the slab is synced.

        Args:
            slab: where.
            run: at most ``MAX_RUN`` pages, in slots that follow each other.

        Raises:
            OSError: the write failed, or the device took only a part.
        """
        blocks = self._blocks(len(run))
        records: list[IndexRecord] = []
        buffers: list[ByteArray] = []
        first = run[0].slot
        for number, placed in enumerate(run):
            header, stored = self._encode(slab, placed)
            encode_header(header, blocks[number])
            records.append(record_of(header, slab.id))
            if not is_direct(stored):
                stored = self._staged(stored, number, slab.slot_bytes - HEADER_BYTES)
            buffers += (blocks[number], stored)
            gap = slab.slot_bytes - HEADER_BYTES - stored.nbytes
            if gap and number + 1 < len(run):  # a short page ends the call
                self._send(slab, first, buffers)
                first, buffers = placed.slot + 1, []
        self._send(slab, first, buffers)
        return records, sum(HEADER_BYTES + round_up(r.stored_bytes) for r in records)

    def _send(self, slab: SlabMeta, slot: int, buffers: Sequence[ByteArray]) -> None:
        fd = self._files.descriptor(slab.id)
        with self._write_turns:
            whole = transfer_all(self._backend.pwritev, fd, buffers, slot * slab.slot_bytes)
        if not whole:
            raise OSError(errno.EIO, "the device took only a part of the page")

    def _encode(self, slab: SlabMeta, placed: Placed) -> tuple[SlotHeader, ByteArray]:
        page = placed.page
        payload = page.payload
        ranges = hash_ranges(payload, page.layer_bytes)
        encoded = self._codec.encode(payload)
        stored, param = encoded if encoded is not None else (payload, 0)
        header = SlotHeader(
            info=page.info,
            slab_uuid=bytes.fromhex(slab.uuid),
            fingerprint=self._fingerprint,
            slot=placed.slot,
            seq=placed.seq,
            raw_bytes=payload.nbytes,
            stored_bytes=stored.nbytes,
            codec=RAW if encoded is None else self._codec.id,
            codec_param=param,
            layer_bytes=page.layer_bytes,
            stored_hash=0 if encoded is None else xxhash.xxh3_64_intdigest(stored.data),
            page_hash=hash_page(ranges),
            durable_seq=placed.durable_seq,
            ranges=ranges,
        )
        return header, stored

    def _staged(self, stored: ByteArray, number: int, slot_payload: int) -> ByteArray:
        """Return an aligned, zero-padded copy in the thread's staging memory."""
        size = round_up(stored.nbytes)
        staging = self._staging((number + 1) * slot_payload)[number * slot_payload :][:size]
        np.copyto(staging[: stored.nbytes], stored)
        staging[stored.nbytes :] = 0
        return staging

    # -- reading -------------------------------------------------------------------------

    def read(self, slab: SlabMeta, wanted: Wanted, turn: Turn = _AT_ONCE) -> SlotRead:
        """Read one page into its destination and check it, twice if need be.

        The destination may hold anything after a fault.

        Args:
            slab: where.
            wanted: what.
            turn: entered for each transfer, and left before the checks.

        Raises:
            OSError: the read failed.
        """
        fault, count = self._read_once(slab, wanted, turn)
        if fault in (None, Fault.STALE):
            return SlotRead(fault, count, False)
        fault, again = self._read_once(slab, wanted, turn)
        return SlotRead(fault, count + again, True)

    def read_run(
        self, slab: SlabMeta, run: Sequence[Wanted], turn: Turn = _AT_ONCE
    ) -> list[SlotRead | None]:
        """Read pages that ``follows`` chained, in one call; None for any that needs ``read``.

        Raises:
            OSError: the read failed; nothing can be said of any page.
        """
        blocks = self._blocks(len(run))
        buffers: list[ByteArray] = []
        for block, wanted in zip(blocks, run, strict=False):
            buffers += (block, wanted.out)
        fd = self._files.descriptor(slab.id)
        at = run[0].location.slot * slab.slot_bytes
        with turn:
            whole = transfer_all(self._backend.preadv, fd, buffers, at)
        if not whole:
            return [None] * len(run)
        results: list[SlotRead | None] = []
        for block, wanted in zip(blocks, run, strict=False):
            good = self._check(slab, wanted, decode_header(block), wanted.out, staged=False) is None
            results.append(SlotRead(None, slab.slot_bytes, False) if good else None)
        return results

    def read_header(self, slab: SlabMeta, slot: int) -> SlotHeader | None:
        """Return the valid header in a slot, or None (blank, damaged, another slab's).

        Raises:
            OSError: the read failed.
        """
        block = self._blocks(1)[0]
        fd = self._files.descriptor(slab.id)
        if not transfer_all(self._backend.preadv, fd, [block], slot * slab.slot_bytes):
            return None
        header = decode_header(block)
        if header is None or not self._belongs(header, slab, slot):
            return None
        fits = HEADER_BYTES + round_up(header.stored_bytes) <= slab.slot_bytes
        return header if fits else None

    def _read_once(self, slab: SlabMeta, wanted: Wanted, turn: Turn) -> tuple[Fault | None, int]:
        location, out = wanted.location, wanted.out
        if wanted.part is not None:
            return self._read_part(slab, wanted, wanted.part, turn)
        straight = location.stored_bytes == location.raw_bytes and is_direct(out)
        body = out if straight else self._staging(round_up(location.stored_bytes))
        block = self._blocks(1)[0]
        fd = self._files.descriptor(slab.id)
        at = location.slot * slab.slot_bytes
        with turn:
            whole = transfer_all(self._backend.preadv, fd, [block, body], at)
        header = decode_header(block) if whole else None
        count = HEADER_BYTES + body.nbytes
        stored = body[: location.stored_bytes]
        return self._check(slab, wanted, header, stored, staged=not straight), count

    def _check(
        self,
        slab: SlabMeta,
        wanted: Wanted,
        header: SlotHeader | None,
        stored: ByteArray,
        *,
        staged: bool,
    ) -> Fault | None:
        """Check header and stored bytes, and bring the page into its destination."""
        location, out = wanted.location, wanted.out
        if header is None:
            return Fault.HEADER
        if not (location.raw_bytes == out.nbytes and self._is_wanted(slab, wanted, header)):
            return Fault.STALE
        if header.codec != RAW:
            return self._decode(header, stored, out)
        fault = compare(header, stored)
        if fault is None and staged:
            np.copyto(out, stored)
        return fault

    def _read_part(
        self, slab: SlabMeta, wanted: Wanted, part: Part, turn: Turn
    ) -> tuple[Fault | None, int]:
        """Read a part of a page, its header too unless another part has read that already."""
        location, out = wanted.location, wanted.out
        if location.stored_bytes != location.raw_bytes:
            return self._cut_out(slab, wanted, part, turn)
        low, high = part.offset & -ALIGNMENT, round_up(part.offset + out.nbytes)
        straight = low == part.offset and is_direct(out)
        body = out if straight else self._staging(high - low)
        fd, at = self._files.descriptor(slab.id), location.slot * slab.slot_bytes
        read, whole, block = self._backend.preadv, True, self._blocks(1)[0]
        header, count = part.head.header, body.nbytes
        with turn:
            if header is None:
                count += HEADER_BYTES
                whole = transfer_all(read, fd, [block] if low else [block, body], at)
            if whole and (low or header is not None):
                whole = transfer_all(read, fd, [body], at + HEADER_BYTES + low)
        header = header or (decode_header(block) if whole else None)
        if header is None or not whole:
            return Fault.HEADER, count
        if not self._is_wanted(slab, wanted, header):
            return Fault.STALE, count
        part.head.header = header
        if not is_cut_at(header, part.offset, out.nbytes):
            return self._cut_out(slab, wanted, part, turn)
        stored = body[part.offset - low :][: out.nbytes]
        fault = compare(header, stored, part.offset)
        if fault is None and not straight:
            np.copyto(out, stored)
        return fault, count

    def _cut_out(
        self, slab: SlabMeta, wanted: Wanted, part: Part, turn: Turn
    ) -> tuple[Fault | None, int]:
        """Read the whole page for a part of it: compressed, or with no checksum of the part."""
        page = aligned_empty(wanted.location.raw_bytes)
        whole = wanted._replace(out=page, part=None)
        fault, count = self._read_once(slab, whole, turn)
        if fault is None:
            np.copyto(wanted.out, page[part.offset :][: wanted.out.nbytes])
        return fault, count

    def _is_wanted(self, slab: SlabMeta, wanted: Wanted, header: SlotHeader) -> bool:
        """Whether a header is that of this very write of the page."""
        location = wanted.location
        return (
            header.info.key == wanted.key
            and header.seq == location.seq
            and self._belongs(header, slab, location.slot)
            and wanted.namespace in (None, header.info.namespace)
            and header.raw_bytes == location.raw_bytes
            and header.stored_bytes == location.stored_bytes
        )

    def _decode(self, header: SlotHeader, stored: ByteArray, out: ByteArray) -> Fault | None:
        codec = self._codecs.get(header.codec)
        if codec is None or xxhash.xxh3_64_intdigest(stored.data) != header.stored_hash:
            return Fault.PAYLOAD
        if not codec.decode(stored, header.codec_param, out):
            return Fault.PAYLOAD
        return compare(header, out)

    def _belongs(self, header: SlotHeader, slab: SlabMeta, slot: int) -> bool:
        return (
            header.slot == slot
            and header.slab_uuid.hex() == slab.uuid
            and header.fingerprint == self._fingerprint
        )

    # -- scratch memory ------------------------------------------------------------------

    def _blocks(self, count: int) -> list[ByteArray]:
        """Return at least ``count`` aligned header blocks of this thread."""
        blocks: list[ByteArray] | None = getattr(self._local, "blocks", None)
        if blocks is None:
            memory = aligned_empty(MAX_RUN * HEADER_BYTES)
            blocks = self._local.blocks = list(memory.reshape(MAX_RUN, HEADER_BYTES))
        assert count <= len(blocks), "too many pages in a run"
        return blocks

    def _staging(self, size: int) -> ByteArray:
        """Return ``size`` aligned bytes of this thread; valid until the next call."""
        staging: ByteArray | None = getattr(self._local, "staging", None)
        if staging is None or staging.nbytes < size:
            staging = self._local.staging = aligned_empty(size)
        return staging[:size]
