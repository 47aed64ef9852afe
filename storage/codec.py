"""Codecs of the SSD tier: how a page's payload is stored.

The raw bytes are what is hashed and served; a codec only changes what lies in the slot, and
the header names it.
"""

from __future__ import annotations

import struct
import threading
from typing import Protocol

import numpy as np
import zstandard

from tierkv.errors import InvalidInputError
from tierkv.storage.aligned import ByteArray

RAW = 0
ZSTD_PLANES = 1

_MIN_GAIN = 0.05  # below this a page is stored raw
_MIN_BETTER = 0.01  # below this more planes are not worth their time
_SAMPLE_BYTES = 64 << 10
_PLANES = (1, 2, 4)
_MAX_WINDOW = 1 << 27


class Codec(Protocol):
    """Encodes and decodes payloads.  Thread-safe; releases the GIL for the heavy part."""

    id: int

    def encode(self, payload: ByteArray) -> tuple[ByteArray, int] | None:
        """Return (encoded bytes, a parameter for the header), or None to store it raw."""
        ...

    def decode(self, stored: ByteArray, param: int, out: ByteArray) -> bool:
        """Decode into ``out``; False when ``stored`` is not exactly ``out.nbytes`` encoded.

        Never writes outside ``out`` and never raises for bad data.
        """
        ...


class RawCodec:
    """Stores payloads as they are."""

    id = RAW

    def encode(self, payload: ByteArray) -> None:
        """Return None: raw."""
        return None

    def decode(self, stored: ByteArray, param: int, out: ByteArray) -> bool:
        """Copy."""
        if param or stored.nbytes != out.nbytes:
            return False
        np.copyto(out, stored)
        return True


class ZstdCodec:
    """Zstandard over byte planes: all first bytes of the elements, then all second ones.

    The exponent bytes of bfloat16 state compress well once they lie side by side; mantissa
    bytes hardly do, and such a plane is stored as it is.  How many planes pay is tried on a
    sample of each page, and a page that gains under 5 % stays raw.

    Stored: the length of each plane (u32), then the planes; each is one zstd frame, or raw
    where its length is the full one.
    """

    id = ZSTD_PLANES

    def __init__(self, level: int = 1) -> None:
        self._level = level
        self._local = threading.local()  # zstandard's contexts are not thread-safe

    def encode(self, payload: ByteArray) -> tuple[ByteArray, int] | None:
        """Return the compressed page and its number of planes, or None."""
        sample = payload[: min(payload.nbytes, _SAMPLE_BYTES) & -4]
        if not sample.nbytes:
            return None
        best, best_size = 0, sample.nbytes * (1 - _MIN_GAIN)
        for planes in _PLANES:
            if payload.nbytes % planes == 0:
                size = sum(len(part) for part in self._compress(sample, planes))
                if size < best_size * (1 - _MIN_BETTER if best else 1):
                    best, best_size = planes, size
        if not best:
            return None
        parts = self._compress(payload, best)
        lengths = struct.pack(f"<{best}I", *(len(part) for part in parts))
        stored = b"".join([lengths, *parts])
        if len(stored) > payload.nbytes * (1 - _MIN_GAIN):
            return None
        return np.frombuffer(stored, np.uint8), best

    def _compress(self, data: ByteArray, planes: int) -> list[bytes]:
        compressor = self._compressor()
        parts = []
        for column in data.reshape(-1, planes).T:
            plane = np.ascontiguousarray(column)
            packed = compressor.compress(plane.data)
            parts.append(packed if len(packed) < plane.nbytes else plane.tobytes())
        return parts

    def decode(self, stored: ByteArray, param: int, out: ByteArray) -> bool:
        """Decompress at most ``out.nbytes``, whatever the stream claims."""
        if param not in _PLANES or out.nbytes % param or stored.nbytes < 4 * param:
            return False
        lengths = struct.unpack_from(f"<{param}I", stored.data)
        if 4 * param + sum(lengths) != stored.nbytes:
            return False
        at = 4 * param
        for column, length in zip(out.reshape(-1, param).T, lengths, strict=True):
            if not self._decode_plane(stored[at : at + length], column):
                return False
            at += length
        return True

    def _decode_plane(self, packed: ByteArray, column: ByteArray) -> bool:
        if packed.nbytes == column.size:
            np.copyto(column, packed)
            return True
        try:
            # Checked first: the library allocates what the frame says.
            if zstandard.frame_content_size(packed.data) != column.size:
                return False
            plane = self._decompressor().decompress(packed.data, allow_extra_data=False)
        except (zstandard.ZstdError, MemoryError):
            return False
        if len(plane) != column.size:
            return False
        np.copyto(column, np.frombuffer(plane, np.uint8))
        return True

    def _compressor(self) -> zstandard.ZstdCompressor:
        if not hasattr(self._local, "compressor"):
            self._local.compressor = zstandard.ZstdCompressor(
                level=self._level, write_checksum=False, write_content_size=True
            )
        compressor: zstandard.ZstdCompressor = self._local.compressor
        return compressor

    def _decompressor(self) -> zstandard.ZstdDecompressor:
        if not hasattr(self._local, "decompressor"):
            self._local.decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
        decompressor: zstandard.ZstdDecompressor = self._local.decompressor
        return decompressor


_CODECS: dict[str, type[RawCodec] | type[ZstdCodec]] = {"raw": RawCodec, "zstd": ZstdCodec}


def make_codec(name: str) -> Codec:
    """Return a codec by name.

    Raises:
        InvalidInputError: an unknown name.
    """
    if name not in _CODECS:
        raise InvalidInputError(f"codec: {name!r} is not one of {sorted(_CODECS)}")
    return _CODECS[name]()


def codecs_by_id() -> dict[int, Codec]:
    """Return one decoder for each codec id that a header may name."""
    return {cls.id: cls() for cls in _CODECS.values()}
