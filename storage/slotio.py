"""Writing one page into a slot and reading it back, every byte checked."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import xxhash

from tierkv.storage.aligned import ByteArray, aligned_empty, is_direct, round_up
from tierkv.storage.backend import IOBackend, transfer_all
from tierkv.storage.catalog import Location
from tierkv.storage.codec import RAW, Codec, codecs_by_id
from tierkv.storage.format import (
    HEADER_BYTES,
    SlotHeader,
    decode_header,
    encode_header,
    hash_page,
    hash_ranges,
)
from tierkv.storage.layout import SlabMeta
from tierkv.storage.slabs import SlabFiles
from tierkv.storage.types import PageWrite


class Fault(StrEnum):
    """Why a slot's contents are not the page that was asked for."""

    HEADER = "header"  # the header does not match its own hash, or the file ends early
    STALE = "stale"  # a valid header of another page, write, slot, slab or store
    PAYLOAD = "payload"  # the payload does not match the hashes in a valid header
    TORN = "torn"  # likewise, and its end is among what does not match


@dataclass(frozen=True, slots=True)
class SlotRead:
    """What reading a slot gave; ``fault`` None means the destination holds the page."""

    fault: Fault | None
    device_bytes: int
    reread: bool


class SlotIO:
    """Slot reads and writes of one store.  Thread-safe: scratch memory is per thread."""

    def __init__(self, files: SlabFiles, backend: IOBackend, codec: Codec) -> None:
        self._files = files
        self._backend = backend
        self._codec = codec
        self._codecs = codecs_by_id()
        self._fingerprint = files.fingerprint
        self._local = threading.local()

    def write(self, page: PageWrite, slab: SlabMeta, slot: int, seq: int) -> tuple[SlotHeader, int]:
        """Write a page and return its header and the bytes sent to the device.

        Nothing is durable before the slab is synced.

        Raises:
            OSError: the write failed, or the device took only a part.
        """
        payload = page.payload
        ranges = hash_ranges(payload, page.layer_bytes)
        encoded = self._codec.encode(payload)
        stored, param = encoded if encoded is not None else (payload, 0)
        header = SlotHeader(
            info=page.info,
            slab_uuid=bytes.fromhex(slab.uuid),
            fingerprint=self._fingerprint,
            slot=slot,
            seq=seq,
            raw_bytes=payload.nbytes,
            stored_bytes=stored.nbytes,
            codec=RAW if encoded is None else self._codec.id,
            codec_param=param,
            layer_bytes=page.layer_bytes,
            stored_hash=0 if encoded is None else xxhash.xxh3_64_intdigest(stored.data),
            page_hash=hash_page(ranges),
            ranges=ranges,
        )
        block = self._header_block()
        encode_header(header, block)
        if is_direct(stored):
            buffers = [block, stored]
        else:
            staging = self._staging(round_up(stored.nbytes))
            np.copyto(staging[: stored.nbytes], stored)
            staging[stored.nbytes :] = 0
            buffers = [block, staging]
        fd = self._files.descriptor(slab.id)
        if not transfer_all(self._backend.pwritev, fd, buffers, slot * slab.slot_bytes):
            raise OSError(5, "the device took only a part of the page")
        return header, sum(b.nbytes for b in buffers)

    def read(
        self,
        key: bytes,
        namespace: bytes | None,
        slab: SlabMeta,
        location: Location,
        out: ByteArray,
    ) -> SlotRead:
        """Read a page into ``out`` (as long as the page) and check it, twice if need be.

        ``out`` may hold anything after a fault.

        Raises:
            OSError: the read failed.
        """
        fault, count = self._read_once(key, namespace, slab, location, out)
        if fault in (None, Fault.STALE):
            return SlotRead(fault, count, False)
        fault, again = self._read_once(key, namespace, slab, location, out)
        return SlotRead(fault, count + again, True)

    def read_header(self, slab: SlabMeta, slot: int) -> SlotHeader | None:
        """Return the valid header in a slot, or None (blank, damaged, another slab's).

        Raises:
            OSError: the read failed.
        """
        block = self._header_block()
        fd = self._files.descriptor(slab.id)
        if not transfer_all(self._backend.preadv, fd, [block], slot * slab.slot_bytes):
            return None
        header = decode_header(block)
        if header is None or not self._belongs(header, slab, slot):
            return None
        fits = HEADER_BYTES + round_up(header.stored_bytes) <= slab.slot_bytes
        return header if fits else None

    def _read_once(
        self,
        key: bytes,
        namespace: bytes | None,
        slab: SlabMeta,
        location: Location,
        out: ByteArray,
    ) -> tuple[Fault | None, int]:
        size = location.stored_bytes
        raw = size == location.raw_bytes
        straight = raw and is_direct(out)
        body = out if straight else self._staging(round_up(size))
        block = self._header_block()
        fd = self._files.descriptor(slab.id)
        at = location.slot * slab.slot_bytes
        count = HEADER_BYTES + body.nbytes
        if not transfer_all(self._backend.preadv, fd, [block, body], at):
            return Fault.HEADER, count
        header = decode_header(block)
        if header is None:
            return Fault.HEADER, count
        if not (
            header.info.key == key
            and header.seq == location.seq
            and self._belongs(header, slab, location.slot)
            and namespace in (None, header.info.namespace)
            and header.raw_bytes == location.raw_bytes == out.nbytes
            and header.stored_bytes == size
        ):
            return Fault.STALE, count
        if straight:
            return _compare(header, out), count
        stored = body[:size]
        if header.codec == RAW:
            fault = _compare(header, stored)
            if fault is None:
                np.copyto(out, stored)
            return fault, count
        return self._decode(header, stored, out), count

    def _decode(self, header: SlotHeader, stored: ByteArray, out: ByteArray) -> Fault | None:
        codec = self._codecs.get(header.codec)
        if codec is None or xxhash.xxh3_64_intdigest(stored.data) != header.stored_hash:
            return Fault.PAYLOAD
        if not codec.decode(stored, header.codec_param, out):
            return Fault.PAYLOAD
        return _compare(header, out)

    def _belongs(self, header: SlotHeader, slab: SlabMeta, slot: int) -> bool:
        return (
            header.slot == slot
            and header.slab_uuid.hex() == slab.uuid
            and header.fingerprint == self._fingerprint
        )

    def _header_block(self) -> ByteArray:
        if not hasattr(self._local, "block"):
            self._local.block = aligned_empty(HEADER_BYTES)
        block: ByteArray = self._local.block
        return block

    def _staging(self, size: int) -> ByteArray:
        if not hasattr(self._local, "staging") or self._local.staging.nbytes < size:
            self._local.staging = aligned_empty(size)
        staging: ByteArray = self._local.staging
        return staging[:size]


def _compare(header: SlotHeader, raw: ByteArray) -> Fault | None:
    actual = hash_ranges(raw, header.layer_bytes)
    if actual == header.ranges:
        return None
    return Fault.TORN if actual[-1] != header.ranges[-1] else Fault.PAYLOAD
