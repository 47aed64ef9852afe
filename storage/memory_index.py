"""The index's in-memory twin: for reading a store whose index file cannot be used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tierkv.storage.format import IndexRecord, decode_record, encode_record


class MemoryIndex:
    """What a header scan found, behind the reading half of ``LmdbIndex``'s interface."""

    def __init__(self, records: Iterable[IndexRecord]) -> None:
        self._records = {r.info.key: encode_record(r) for r in records}

    def get(self, key: bytes) -> IndexRecord | None:
        """Return the record under ``key``."""
        value = self._records.get(key)
        return None if value is None else decode_record(key, value)

    def records(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield (key, encoded record) in key order."""
        return iter(sorted(self._records.items()))

    def usage(self, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """Return zeros: headers do not record use."""
        return [(0, 0)] * len(keys)

    def close(self) -> None:
        """Do nothing."""
