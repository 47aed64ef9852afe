"""The bytes on disk: slot headers and index records, version 1.

``docs/format.md`` describes the same layout for people.  All integers are little-endian.
Nothing here does I/O.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from tierkv.errors import InvalidInputError
from tierkv.storage.aligned import ALIGNMENT, ByteArray, round_up

FORMAT_VERSION = 1
KEY_BYTES = 32
HEADER_BYTES = ALIGNMENT
PAGE_TAIL = 1
ZERO_KEY = bytes(KEY_BYTES)

_MAGIC = b"TKVSLOT\x01"
_HEADER = struct.Struct("<8sHHI16s16s32s32s32sQQQQQIIIBBHQIIQ16sQ")
_RANGES_AT = 256
_HASH_AT = HEADER_BYTES - 8
MAX_RANGES = (_HASH_AT - _RANGES_AT) // 8
_RECORD = struct.Struct("<IIQQQQQIIHBB8s32s32s")
_U64 = struct.Struct("<Q")
RECORD_BYTES = _RECORD.size + 8


@dataclass(frozen=True, slots=True)
class PageInfo:
    """What a slot's header says of a page, besides its bytes.

    Attributes:
        key: the page's key, 32 bytes.
        namespace: digest of the namespace, 32 bytes.
        parent: key of the parent page in the prefix tree, zeros when there is none.
        group: index of the layer group.
        end_token: length of the prefix that this page completes.
        num_tokens: valid tokens in the page.
        flags: bit 0 (``PAGE_TAIL``): a tail page.
        created_s: Unix seconds, for people only.
    """

    key: bytes
    namespace: bytes
    parent: bytes = ZERO_KEY
    group: int = 0
    end_token: int = 0
    num_tokens: int = 0
    flags: int = 0
    created_s: int = 0


class SlotHeader(NamedTuple):
    """The decoded header of a slot.

    ``ranges`` are the xxh3_64 of the payload's ranges.  ``durable_seq`` says that every write
    up to that sequence number was whole and synced before this one began; recovery reads the
    payloads of later writes only.
    """

    info: PageInfo
    slab_uuid: bytes
    fingerprint: bytes
    slot: int
    seq: int
    raw_bytes: int
    stored_bytes: int
    codec: int
    codec_param: int
    layer_bytes: int
    stored_hash: int
    page_hash: bytes
    durable_seq: int
    ranges: tuple[int, ...]


class IndexRecord(NamedTuple):
    """One page as the index names it: where it is, and what its header says."""

    info: PageInfo
    slab: int
    slot: int
    seq: int
    raw_bytes: int
    stored_bytes: int
    codec: int
    codec_param: int
    hash8: bytes


def check_info(info: PageInfo) -> None:
    """Raise InvalidInputError unless every field of ``info`` fits the format."""
    for name in ("key", "namespace", "parent"):
        value = getattr(info, name)
        if not isinstance(value, bytes) or len(value) != KEY_BYTES:
            raise InvalidInputError(f"page {name}: expected {KEY_BYTES} bytes, got {value!r}")
    for name, bits in (
        ("group", 32),
        ("end_token", 64),
        ("num_tokens", 32),
        ("flags", 16),
        ("created_s", 64),
    ):
        value = getattr(info, name)
        if not 0 <= value < 1 << bits:
            raise InvalidInputError(f"page {name}: must fit {bits} bits unsigned, got {value!r}")


def slot_bytes(payload_bytes: int) -> int:
    """Return the size of a slot for pages of ``payload_bytes``: header, payload, padding."""
    return HEADER_BYTES + round_up(payload_bytes)


def hash_ranges(payload: ByteArray, layer_bytes: int) -> tuple[int, ...]:
    """Return the xxh3_64 of each ``layer_bytes`` of the payload (0: one range)."""
    size = payload.nbytes
    step = layer_bytes or size
    digest = xxhash.xxh3_64_intdigest
    if step >= size:
        return (digest(payload.data),)
    view = payload.data
    return tuple([digest(view[at : at + step]) for at in range(0, size, step)])


def hash_page(ranges: tuple[int, ...]) -> bytes:
    """Return the page hash: xxh3_128 over the range hashes, so each byte is hashed once."""
    return xxhash.xxh3_128_digest(struct.pack(f"<{len(ranges)}Q", *ranges))


def encode_header(header: SlotHeader, out: ByteArray) -> None:
    """Write a slot header into ``out`` (4 KiB), padding zeroed and header hash last."""
    info = header.info
    out.fill(0)
    block = out.data
    _HEADER.pack_into(
        block,
        0,
        _MAGIC,
        FORMAT_VERSION,
        info.flags,
        HEADER_BYTES,
        header.slab_uuid,
        header.fingerprint,
        info.key,
        info.parent,
        info.namespace,
        header.seq,
        header.raw_bytes,
        header.stored_bytes,
        info.end_token,
        info.created_s,
        info.group,
        info.num_tokens,
        header.slot,
        header.codec,
        header.codec_param,
        0,
        header.layer_bytes,
        len(header.ranges),
        0,
        header.stored_hash,
        header.page_hash,
        header.durable_seq,
    )
    struct.pack_into(f"<{len(header.ranges)}Q", block, _RANGES_AT, *header.ranges)
    _U64.pack_into(block, _HASH_AT, xxhash.xxh3_64_intdigest(block[:_HASH_AT]))


def decode_header(data: ByteArray) -> SlotHeader | None:
    """Return the header in a 4 KiB block, or None when its hash or its fields are wrong."""
    block = data.data
    if _U64.unpack_from(block, _HASH_AT)[0] != xxhash.xxh3_64_intdigest(block[:_HASH_AT]):
        return None
    (
        magic,
        version,
        flags,
        header_bytes,
        slab_uuid,
        fingerprint,
        key,
        parent,
        namespace,
        seq,
        raw_bytes,
        stored_bytes,
        end_token,
        created_s,
        group,
        num_tokens,
        slot,
        codec,
        codec_param,
        _,
        layer_bytes,
        num_ranges,
        _,
        stored_hash,
        page_hash,
        durable_seq,
    ) = _HEADER.unpack_from(block)
    if magic != _MAGIC or version != FORMAT_VERSION or header_bytes != HEADER_BYTES:
        return None
    if not 0 < num_ranges <= MAX_RANGES:
        return None
    ranges = struct.unpack_from(f"<{num_ranges}Q", block, _RANGES_AT)
    info = PageInfo(key, namespace, parent, group, end_token, num_tokens, flags, created_s)
    return SlotHeader(
        info,
        slab_uuid,
        fingerprint,
        slot,
        seq,
        raw_bytes,
        stored_bytes,
        codec,
        codec_param,
        layer_bytes,
        stored_hash,
        page_hash,
        durable_seq,
        ranges,
    )


def record_of(header: SlotHeader, slab: int) -> IndexRecord:
    """Return the index record of a page from its slot header."""
    return IndexRecord(
        header.info,
        slab,
        header.slot,
        header.seq,
        header.raw_bytes,
        header.stored_bytes,
        header.codec,
        header.codec_param,
        header.page_hash[:8],
    )


def encode_record(record: IndexRecord) -> bytes:
    """Return an index value: the record, then xxh3_64 over key and record."""
    info = record.info
    body = _RECORD.pack(
        record.slab,
        record.slot,
        record.seq,
        record.raw_bytes,
        record.stored_bytes,
        info.end_token,
        info.created_s,
        info.group,
        info.num_tokens,
        info.flags,
        record.codec,
        record.codec_param,
        record.hash8,
        info.parent,
        info.namespace,
    )
    return body + _U64.pack(xxhash.xxh3_64_intdigest(info.key + body))


def record_sum(value: bytes) -> int:
    """Return the checksum that ends an index value."""
    return int(_U64.unpack_from(value, RECORD_BYTES - 8)[0])


def decode_record(key: bytes, value: bytes) -> IndexRecord | None:
    """Return the record under ``key``, or None when it does not check out."""
    if len(key) != KEY_BYTES or len(value) != RECORD_BYTES:
        return None
    if record_sum(value) != xxhash.xxh3_64_intdigest(key + value[:-8]):
        return None
    (
        slab,
        slot,
        seq,
        raw_bytes,
        stored_bytes,
        end_token,
        created_s,
        group,
        num_tokens,
        flags,
        codec,
        codec_param,
        hash8,
        parent,
        namespace,
    ) = _RECORD.unpack_from(value)
    info = PageInfo(key, namespace, parent, group, end_token, num_tokens, flags, created_s)
    return IndexRecord(info, slab, slot, seq, raw_bytes, stored_bytes, codec, codec_param, hash8)
