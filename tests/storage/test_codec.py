"""Codecs: what goes in comes out bit for bit, and bad streams do no harm."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tierkv.errors import InvalidInputError
from tierkv.storage.aligned import aligned_empty
from tierkv.storage.codec import ZSTD_PLANES, RawCodec, ZstdCodec, make_codec
from tierkv.storage.format import HEADER_BYTES, decode_header
from tierkv.storage.ssd import PageWrite, ReadStatus, WriteStatus
from tierkv.storage.testing import make_page, page_key

SIZE = 48 << 10


def bfloat16_like(size: int, seed: int = 0) -> np.ndarray:
    """Return bytes that look like attention state: normal values with channel scales."""
    rng = np.random.default_rng(seed)
    scales = rng.lognormal(0, 1, 64)
    values = (rng.standard_normal((size // 128, 64)) * scales).astype(np.float32)
    return (
        np.ascontiguousarray((values.view(np.uint32) >> 16).astype(np.uint16))
        .view(np.uint8)
        .ravel()[:size]
    )


def float32_like(size: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(size // 4).astype(np.float32).view(np.uint8)


def test_bfloat16_state_gains_what_byte_planes_promise():
    data = bfloat16_like(1 << 20)
    codec = ZstdCodec()
    stored, planes = codec.encode(data)
    assert planes == 2
    assert data.nbytes / stored.nbytes > 1.3
    out = np.empty_like(data)
    assert codec.decode(stored, planes, out)
    assert np.array_equal(out, data)


def test_the_number_of_planes_follows_the_data():
    assert ZstdCodec().encode(float32_like(1 << 18))[1] == 4
    assert ZstdCodec().encode(np.tile(np.arange(251, dtype=np.uint8), 400))[1] == 1


@given(st.binary(min_size=0, max_size=5000), st.sampled_from([b"", b"\0" * 4000, b"abc" * 999]))
def test_any_bytes_round_trip(data: bytes, filler: bytes):
    payload = np.frombuffer(data + filler, np.uint8)
    codec = ZstdCodec()
    encoded = codec.encode(payload)
    if encoded is None:
        return
    stored, param = encoded
    assert stored.nbytes <= payload.nbytes * 0.95
    out = np.empty(payload.nbytes, np.uint8)
    assert codec.decode(stored, param, out)
    assert np.array_equal(out, payload)


def test_incompressible_pages_stay_raw():
    assert ZstdCodec().encode(np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)) is None
    assert RawCodec().encode(np.zeros(SIZE, np.uint8)) is None


def test_a_page_whose_start_alone_compresses_stays_raw():
    data = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
    data[: 64 << 10] = 0
    encoded = ZstdCodec().encode(data)
    assert encoded is None or encoded[0].nbytes <= data.nbytes * 0.95


@given(st.binary(max_size=200), st.integers(0, 255))
def test_garbage_is_no_page(data: bytes, param: int):
    out = np.empty(4096, np.uint8)
    assert not ZstdCodec().decode(np.frombuffer(data, np.uint8), param, out)


def decode(*frames: bytes, size: int = SIZE, lengths: list[int] | None = None) -> bool:
    """Decode frames as the planes of a page, watching the memory behind the destination."""
    lengths = lengths or [len(f) for f in frames]
    stored = struct.pack(f"<{len(lengths)}I", *lengths) + b"".join(frames)
    guarded = np.full(size + 4096, 170, np.uint8)
    result = ZstdCodec().decode(np.frombuffer(stored, np.uint8), len(frames), guarded[:size])
    assert (guarded[size:] == 170).all(), "written outside the destination"
    return result


@pytest.mark.parametrize("cut", [1, 5, 15])
def test_cut_streams(cut):
    stored = zstandard.compress(bytes(SIZE))
    assert decode(stored)
    assert not decode(stored[:-cut])


def test_streams_of_another_length():
    assert not decode(zstandard.compress(bytes(SIZE - 1)))
    assert not decode(zstandard.compress(bytes(SIZE + 1)))
    assert not decode(zstandard.compress(bytes(SIZE)), size=SIZE // 2)
    half = zstandard.compress(bytes(SIZE // 2))
    assert decode(half, half)
    assert decode(half, bytes(SIZE // 2))
    assert not decode(half, bytes(SIZE // 2 - 1))


def test_lengths_that_do_not_add_up():
    frame = zstandard.compress(bytes(SIZE))
    for wrong in (0, len(frame) - 1, len(frame) + 1, 2**32 - 1):
        assert not decode(frame, lengths=[wrong])


def test_decompression_bombs_are_bounded():
    assert not decode(zstandard.compress(bytes(256 << 20)))
    unsized = zstandard.ZstdCompressor(write_content_size=False)
    assert not decode(unsized.compress(bytes(64 << 20)))
    liar = bytearray(zstandard.compress(bytes(SIZE)))
    at = bytes(liar).index(struct.pack("<H", SIZE - 256))
    liar[at : at + 2] = struct.pack("<H", SIZE - 256 - 1)
    assert not decode(bytes(liar))


def test_trailing_bytes_and_second_frames():
    frame = zstandard.compress(bytes(SIZE))
    for extra in (frame, b"more"):
        assert not decode(frame + extra)
    assert not decode(zstandard.compress(bytes(SIZE // 2)) * 2)


def test_random_damage_never_raises():
    rng = np.random.default_rng(5)
    codec = ZstdCodec()
    stored, planes = codec.encode(bfloat16_like(SIZE))
    out = np.empty(SIZE, np.uint8)
    for _ in range(300):
        damaged = stored.copy()
        damaged[rng.integers(0, stored.nbytes)] ^= 1 << rng.integers(0, 8)
        codec.decode(damaged, planes, out)


SPECIAL = np.array(
    [0x7FC1, 0xFFFF, 0x7F81, 0x7F80, 0xFF80, 0x8000, 0x0000, 0x0001, 0x8001, 0x007F], np.uint16
)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_special_values_are_bit_exact(open_tier, codec):
    """NaN payloads, infinities, negative zero and denormals of bfloat16."""
    tier = open_tier(codec=codec, slot_payload_bytes=SIZE)
    payload = np.tile(SPECIAL, SIZE // 20 + 1)[: SIZE // 2].copy().view(np.uint8)
    assert tier.put([PageWrite(make_page(1, 1).info, payload)]).wait(20) == [WriteStatus.WRITTEN]
    out = aligned_empty(SIZE)
    assert tier.read([page_key(1)], [out]) == [ReadStatus.HIT]
    assert np.array_equal(out.view(np.int16), payload.view(np.int16))


def stored_header(tier, number):
    location, _ = tier._core.catalog.pin(page_key(number), None)
    tier._core.catalog.unpin(location)
    with open(tier._core.layout.slab(location.slab), "rb") as file:
        file.seek(location.slot * (SIZE + HEADER_BYTES))
        return decode_header(np.frombuffer(file.read(HEADER_BYTES), np.uint8).copy())


def test_the_header_names_the_codec(open_tier):
    tier = open_tier(codec="zstd", slot_payload_bytes=SIZE)
    tier.put([PageWrite(make_page(1, 1).info, bfloat16_like(SIZE), SIZE // 4)]).wait(20)
    tier.put([make_page(2, SIZE)]).wait(20)
    first, second = stored_header(tier, 1), stored_header(tier, 2)
    assert (first.codec, first.codec_param) == (ZSTD_PLANES, 2)
    assert first.stored_bytes < first.raw_bytes == SIZE
    assert len(first.ranges) == 4
    assert (second.codec, second.stored_bytes) == (0, SIZE)
    assert tier.stats().device_bytes_written < 2 * SIZE


def test_compressed_pages_are_read_by_a_raw_tier(open_tier):
    data = bfloat16_like(SIZE)
    tier = open_tier(codec="zstd", slot_payload_bytes=SIZE)
    tier.put([PageWrite(make_page(1, 1).info, data)]).wait(20)
    tier.close()
    tier = open_tier(slot_payload_bytes=SIZE)
    out = aligned_empty(SIZE)
    assert tier.read([page_key(1)], [out]) == [ReadStatus.HIT]
    assert np.array_equal(out, data)
    assert tier.verify().ok


def test_damage_to_a_compressed_page_is_a_miss(open_tier):
    tier = open_tier(codec="zstd", slot_payload_bytes=SIZE)
    tier.put([PageWrite(make_page(1, 1).info, bfloat16_like(SIZE))]).wait(20)
    with open(tier._core.layout.slab(0), "r+b") as file:
        file.seek(HEADER_BYTES + 100)
        file.write(b"damage")
    out = aligned_empty(SIZE)
    assert tier.read([page_key(1)], [out]) == [ReadStatus.CORRUPT]


def test_unknown_codec():
    with pytest.raises(InvalidInputError, match="zstd"):
        make_codec("zip")
