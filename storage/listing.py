"""All pages of a store with their use, from the index alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tierkv.storage.format import IndexRecord, decode_record
from tierkv.storage.index import LmdbIndex
from tierkv.storage.memory_index import MemoryIndex

_BATCH = 512


def list_records(index: LmdbIndex | MemoryIndex) -> Iterator[tuple[IndexRecord, int, int]]:
    """Yield (record, hits, last use in Unix seconds) of every record that checks out.

    Beside a writer, pages that come or go meanwhile may or may not appear.
    """
    batch: list[IndexRecord] = []
    for key, value in index.records():
        record = decode_record(key, value)
        if record is not None:
            batch.append(record)
        if len(batch) == _BATCH:
            yield from _with_usage(index, batch)
            batch = []
    yield from _with_usage(index, batch)


def _with_usage(
    index: LmdbIndex | MemoryIndex, records: Sequence[IndexRecord]
) -> Iterator[tuple[IndexRecord, int, int]]:
    usage = index.usage([record.info.key for record in records])
    for record, (hits, last_used) in zip(records, usage, strict=True):
        yield record, hits, last_used
