"""The bytes on disk: whatever is changed in them is noticed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.errors import InvalidInputError
from tierkv.storage.aligned import aligned_empty
from tierkv.storage.format import (
    HEADER_BYTES,
    MAX_RANGES,
    PAGE_TAIL,
    PageInfo,
    SlotHeader,
    check_info,
    decode_header,
    decode_record,
    encode_header,
    encode_record,
    hash_page,
    hash_ranges,
    record_of,
    slot_bytes,
)

keys = st.binary(min_size=32, max_size=32)
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)

infos = st.builds(
    PageInfo,
    key=keys,
    namespace=keys,
    parent=keys,
    group=u32,
    end_token=u64,
    num_tokens=u32,
    flags=st.integers(0, 2**16 - 1),
    created_s=u64,
)
headers = st.builds(
    SlotHeader,
    info=infos,
    slab_uuid=st.binary(min_size=16, max_size=16),
    fingerprint=st.binary(min_size=16, max_size=16),
    slot=u32,
    seq=u64,
    raw_bytes=u32,
    stored_bytes=u32,
    codec=st.integers(0, 255),
    codec_param=st.integers(0, 255),
    layer_bytes=u32,
    stored_hash=u64,
    page_hash=st.binary(min_size=16, max_size=16),
    durable_seq=u64,
    ranges=st.lists(u64, min_size=1, max_size=MAX_RANGES).map(tuple),
)


def sample_header() -> SlotHeader:
    info = PageInfo(bytes(range(32)), b"n" * 32, b"p" * 32, 1, 640, 128, PAGE_TAIL, 1_700_000_000)
    return SlotHeader(
        info, b"u" * 16, b"f" * 16, 3, 9, 8192, 8192, 0, 0, 4096, 0, b"h" * 16, 5, (1, 2)
    )


@given(headers)
def test_header_round_trip(header: SlotHeader):
    block = aligned_empty(HEADER_BYTES)
    encode_header(header, block)
    assert decode_header(block) == header


@given(headers, u32)
def test_record_round_trip(header: SlotHeader, slab: int):
    record = record_of(header, slab)
    assert decode_record(header.info.key, encode_record(record)) == record


def test_every_flipped_header_byte_is_noticed():
    block = aligned_empty(HEADER_BYTES)
    encode_header(sample_header(), block)
    for at in range(HEADER_BYTES):
        block[at] ^= 0x10
        assert decode_header(block) is None, f"byte {at}"
        block[at] ^= 0x10
    assert decode_header(block) == sample_header()


def test_every_flipped_record_bit_is_noticed():
    header = sample_header()
    value = encode_record(record_of(header, 7))
    for bit in range(len(value) * 8):
        damaged = bytearray(value)
        damaged[bit // 8] ^= 1 << bit % 8
        assert decode_record(header.info.key, bytes(damaged)) is None
    assert decode_record(header.info.key, value[:-1]) is None


def test_a_record_belongs_to_its_key():
    header = sample_header()
    value = encode_record(record_of(header, 7))
    assert decode_record(bytes(32), value) is None


def test_blank_and_zero_blocks_are_no_headers():
    assert decode_header(np.zeros(HEADER_BYTES, np.uint8)) is None
    assert decode_header(np.full(HEADER_BYTES, 255, np.uint8)) is None


def test_each_range_has_its_own_hash():
    payload = np.arange(4 * 4096, dtype=np.uint32).view(np.uint8)
    before = hash_ranges(payload, 4096 * 4)
    assert len(before) == 4
    payload[4096 * 4 + 5] ^= 1
    after = hash_ranges(payload, 4096 * 4)
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True, True]
    assert hash_page(before) != hash_page(after)
    assert len(hash_ranges(payload, 0)) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("key", b"short"),
        ("namespace", "n" * 32),
        ("parent", bytes(33)),
        ("group", -1),
        ("num_tokens", 2**32),
        ("flags", 2**16),
    ],
)
def test_fields_that_do_not_fit_are_refused(field: str, value: object):
    fields = {"key": bytes(32), "namespace": bytes(32), field: value}
    with pytest.raises(InvalidInputError, match=field):
        check_info(PageInfo(**fields))


def test_slot_sizes():
    assert slot_bytes(1) == 8192
    assert slot_bytes(4096) == 8192
    assert slot_bytes(4097) == 4096 * 3
