"""How the commands reach a store directory: all of their dealings with the storage layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierkv.cli.namespaces import Names
from tierkv.cli.pages import PageRow
from tierkv.errors import NotAStoreError
from tierkv.live import LIVE_NAME, PageRecords, read_live, read_live_pages
from tierkv.storage.format import HEADER_BYTES, PageInfo
from tierkv.storage.layout import Layout, StoreMeta, load_meta
from tierkv.storage.lock import is_locked, read_owner
from tierkv.tiers import Tier

if TYPE_CHECKING:
    from tierkv.storage.ssd import SsdTier

_MEMORY_TIERS = (Tier.DEVICE, Tier.HOST)


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that has a store open, as far as its lock file tells."""

    pid: int | None
    host: str | None
    since: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return asdict(self)


def owner_of(directory: Path) -> Owner | None:
    """Return who has the store open, or None.

    Raises:
        NotAStoreError, StoreVersionError, StoreError: not a store that can be read.
    """
    _meta(directory)
    layout = Layout(str(directory))
    if not is_locked(layout.lock):
        return None
    found = read_owner(layout.lock)
    return Owner(found.pid, found.host, found.since)


def live_snapshot(directory: Path, owner: Owner | None) -> dict[str, Any] | None:
    """Return the statistics that the owner publishes, or None."""
    snapshot = read_live(directory / LIVE_NAME) if owner is not None else None
    if owner is None or snapshot is None or snapshot.pop("pid", None) != owner.pid:
        return None
    return snapshot


@contextmanager
def read_only(directory: Path, *, direct: bool = False) -> Iterator[SsdTier]:
    """Open the disk tier to look at it, whoever has it open.

    Args:
        directory: the store.
        direct: read pages past the page cache, as they are on the device.
    """
    from tierkv.storage.ssd import SsdTier

    capacity, payload = _size_at_rest(directory)
    with SsdTier.open(
        directory,
        capacity_bytes=capacity,
        slot_payload_bytes=payload,
        read_only=True,
        direct=direct,
    ) as tier:
        yield tier


@contextmanager
def read_write(directory: Path) -> Iterator[SsdTier]:
    """Open the disk tier to change it, as its only owner, at the size that it has.

    Raises:
        StoreLockedError: another process has it open.
    """
    from tierkv.storage.ssd import SsdTier

    capacity, payload = _size_at_rest(directory)
    with SsdTier.open(directory, capacity_bytes=capacity, slot_payload_bytes=payload) as tier:
        yield tier


def disk_stats(tier: SsdTier) -> dict[str, Any]:
    """Return a disk tier at rest in the form in which a running store publishes it."""
    stats = tier.stats()
    slots = stats.pages + stats.free_slots + stats.deferred_slots + stats.writing_slots
    return {
        "capacity_bytes": stats.slab_bytes,
        "used_bytes": stats.used_bytes,
        "capacity_pages": slots if stats.slabs else 0,
        "pages": stats.pages,
        "payload_bytes": stats.page_bytes,
        "slabs": stats.slabs,
        "slab_bytes": stats.slab_bytes,
        "clean": stats.clean_open,
    }


def read_pages(directory: Path) -> tuple[list[PageRow], Names]:
    """Return the pages on disk and, of a running store, in memory; and names for them."""
    owner = owner_of(directory)
    with read_only(directory) as tier:
        rows = {row.info.key: row for row in _disk_rows(tier)}
        names = Names(tier.namespaces)
    snapshot = live_snapshot(directory, owner)
    pages = read_live_pages(directory / LIVE_NAME) if snapshot is not None else None
    if snapshot is not None and pages is not None:
        for row in _memory_rows(pages, snapshot):
            below = rows.get(row.info.key)
            rows[row.info.key] = row if below is None else _joined(row, below)
    return list(rows.values()), names


def _disk_rows(tier: SsdTier) -> Iterator[PageRow]:
    for record, hits, last_used in tier.records():
        info = record.info
        yield PageRow(info, record.stored_bytes, hits, max(last_used, info.created_s))


def _memory_rows(pages: PageRecords, snapshot: dict[str, Any]) -> Iterator[PageRow]:
    namespace = bytes.fromhex(snapshot.get("namespace", ""))
    page_bytes = int(snapshot.get("page_bytes", 0))
    for page in pages:
        info = PageInfo(
            key=page["key"].tobytes(),
            namespace=namespace,
            parent=page["parent"].tobytes(),
            group=int(page["group"]),
            end_token=int(page["end_token"]),
            num_tokens=int(page["num_tokens"]),
            flags=int(page["flags"]),
            created_s=int(page["created_s"]),
        )
        tiers = tuple(t.label for t in _MEMORY_TIERS if int(page["tiers"]) >> t & 1)
        yield PageRow(info, page_bytes, int(page["hits"]), int(page["last_used_s"]), tiers)


def _joined(memory: PageRow, disk: PageRow) -> PageRow:
    """Return one row for a page in memory and on disk, with the newer use."""
    newer = max(memory, disk, key=lambda row: (row.last_used, row.hits))
    return PageRow(
        info=disk.info,
        stored_bytes=disk.stored_bytes,
        hits=newer.hits,
        last_used=newer.last_used,
        tiers=memory.tiers + disk.tiers,
    )


def _size_at_rest(directory: Path) -> tuple[int, int]:
    """Return (bytes of all slabs, payload bytes of the largest slot) of a store.

    Opening it at this size keeps every slab, and adds none.

    Raises:
        NotAStoreError, StoreVersionError, StoreError: not a store that can be read.
    """
    meta = _meta(directory)
    largest = max((slab.slot_bytes for slab in meta.slabs), default=2 * HEADER_BYTES)
    total = sum(slab.file_bytes for slab in meta.slabs)
    return max(total, largest), largest - HEADER_BYTES


def _meta(directory: Path) -> StoreMeta:
    meta = load_meta(Layout(str(directory)).meta)
    if meta is None:
        what = "not a tierkv store (no meta file)" if directory.exists() else "no such directory"
        raise NotAStoreError(f"{directory}: {what}; name the directory of a store")
    return meta


def count_pages(directory: Path) -> int:
    """Return how many pages a store at rest holds."""
    with read_only(directory) as tier:
        return tier.stats().pages
