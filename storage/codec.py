"""Codecs of the SSD tier: how a page's payload is stored.

The raw bytes are what is hashed and served; a codec only changes what lies in the slot, and
the header names it.
"""

from __future__ import annotations

import threading
from typing import Protocol

import numpy as np
import zstandard

from tierkv.errors import InvalidInputError
from tierkv.storage.aligned import ByteArray

RAW = 0
ZSTD_PLANES = 1

_MIN_GAIN = 0.05
_SAMPLE_BYTES = 64 << 10
_PLANES = (2, 4, 1)  # bfloat16 first: the usual case wins ties
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

    The exponent bytes of bfloat16 state compress well once they lie side by side; how many
    planes pay is tried on a sample of each page.  A page that gains under 5 % stays raw.
    """

    id = ZSTD_PLANES

    def __init__(self, level: int = 1) -> None:
        self._level = level
        self._local = threading.local()  # zstandard's contexts are not thread-safe

    def encode(self, payload: ByteArray) -> tuple[ByteArray, int] | None:
        """Return the compressed page and its number of planes, or None."""
        compressor = self._compressor()
        sample = payload[: min(payload.nbytes, _SAMPLE_BYTES) & -4]
        sizes = {
            n: len(compressor.compress(_split(sample, n).data)) for n in _PLANES if sample.nbytes
        }
        planes = min(sizes, key=lambda n: sizes[n]) if sizes else 1
        if sizes and sizes[planes] > sample.nbytes * (1 - _MIN_GAIN):
            return None
        if payload.nbytes % planes:
            planes = 1
        stored = compressor.compress(_split(payload, planes).data)
        if len(stored) > payload.nbytes * (1 - _MIN_GAIN):
            return None
        return np.frombuffer(stored, np.uint8), planes

    def decode(self, stored: ByteArray, param: int, out: ByteArray) -> bool:
        """Decompress at most ``out.nbytes``, whatever the stream claims."""
        if param not in _PLANES or out.nbytes % param:
            return False
        planar = out if param == 1 else np.empty(out.nbytes, np.uint8)
        try:
            if zstandard.frame_content_size(stored.data) != out.nbytes:
                return False
            with self._decompressor().stream_reader(
                stored.data, read_across_frames=False
            ) as reader:
                view = planar.data
                while view and (count := reader.readinto(view)):
                    view = view[count:]
                if view or reader.read(1):
                    return False
        except zstandard.ZstdError:
            return False
        if param != 1:
            _merge(planar, param, out)
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


def _split(data: ByteArray, planes: int) -> ByteArray:
    if planes == 1:
        return data
    out = np.empty(data.nbytes, np.uint8)
    np.copyto(out.reshape(planes, -1), data.reshape(-1, planes).T)
    return out


def _merge(planar: ByteArray, planes: int, out: ByteArray) -> None:
    np.copyto(out.reshape(-1, planes), planar.reshape(planes, -1).T)


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
