"""Opens a store: checks the options, sizes the tiers, reads the disk tier's index."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tierkv.control_plane.index import PrefixIndex
from tierkv.control_plane.planner import Planner
from tierkv.control_plane.policies import make_policy
from tierkv.data_plane.core import Core
from tierkv.data_plane.pool import DevicePool
from tierkv.devices import open_device
from tierkv.errors import (
    CapacityError,
    InvalidInputError,
    NamespaceMismatchError,
    UnsupportedError,
)
from tierkv.identity.keys import key_array
from tierkv.identity.spec import CacheSpec, GroupKind
from tierkv.stats import Counters
from tierkv.storage.arena import HostArena
from tierkv.storage.ssd import SsdTier
from tierkv.tiers import Tier
from tierkv.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from tierkv.devices.base import Device
    from tierkv.identity.keys import Namespace

log = logging.getLogger(__name__)
_MIN_HOST_PAGES = 8  # transfers between device and disk pass through host memory
_STAGING_PAGES = 8  # besides, for when pages in use fill the host tier
_READ_AT_ONCE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of :meth:`tierkv.Store.open`, checked.

    Raises:
        InvalidInputError: one of them cannot work.
    """

    device: int | str | None
    host: int | str | None
    disk: int | str | None
    torch_device: str | Device
    policy: str
    codec: str
    boundary_pages: int
    write_through: bool
    io_timeout_s: float
    prefault: bool

    def __post_init__(self) -> None:
        for name in ("device", "host", "disk"):
            value = getattr(self, name)
            if value is not None:
                parse_bytes(value, name=name)
        if self.boundary_pages < 1:
            raise InvalidInputError(f"boundary_pages must be >= 1, got {self.boundary_pages}")
        if not self.io_timeout_s > 0:
            raise InvalidInputError(f"io_timeout_s must be positive, got {self.io_timeout_s}")


def open_core(
    directory: Path | None,
    spec: CacheSpec,
    namespace: Namespace,
    options: Options,
    *,
    clock: Callable[[], float],
    wall_clock: Callable[[], float],
) -> Core:
    """Open the tiers and put them together; nothing stays open when that fails."""
    _check_spec(spec, namespace, options)
    disk = _open_disk(directory, spec, namespace, options)
    opened: list[Callable[[], object]] = [] if disk is None else [disk.close]
    try:
        device = open_device(options.torch_device)
        opened.append(device.close)
        budget = None if options.device is None else parse_bytes(options.device, name="device")
        pool = DevicePool(device, spec, budget)
        host_pages = _host_pages(spec, options)
        pin = None if device.name == "cpu" else device.pin
        arena = HostArena(host_pages + _STAGING_PAGES, spec.slot_bytes, pin=pin)
        opened.append(arena.close)
        if options.prefault:
            pool.memory.zero_()
            arena.touch()
        stored = 0 if disk is None else disk.stats().pages
        disk_pages = 0 if disk is None else max(disk.capacity_pages, stored)
        slots = {Tier.DEVICE: pool.num_slots, Tier.HOST: host_pages}
        pages = sum(slots.values()) + disk_pages
        # Parents that are known by key only, and chains' roots, take rows as well.
        index = PrefixIndex(
            pages + pages // 4 + 1024,
            {t: make_policy(options.policy) for t in (Tier.DEVICE, Tier.HOST, Tier.DISK)},
        )
        if disk is not None:
            _read_index(disk, index)
        return Core(
            spec=spec,
            namespace=namespace,
            planner=Planner(index, slots=slots, disk_pages=disk_pages),
            device=device,
            pool=pool,
            arena=arena,
            disk=disk,
            counters=Counters(),
            timeout_s=options.io_timeout_s,
            write_through=options.write_through,
            boundary_tokens=_boundary_tokens(spec, options.boundary_pages),
            clock=clock,
            wall_clock=wall_clock,
        )
    except BaseException:
        for close in reversed(opened):
            close()
        raise


def _check_spec(spec: CacheSpec, namespace: Namespace, options: Options) -> None:
    described = json.loads(namespace.description).get("spec")
    if described != spec.identity():
        raise NamespaceMismatchError(
            "the namespace was built from another spec than the one given; build it with "
            "Namespace.build(spec, weights=...) from the same spec"
        )
    kinds = [g.name for g in spec.groups if g.kind is GroupKind.SNAPSHOT]
    if kinds and options.device is not None:
        raise UnsupportedError(
            f"layer groups {kinds}: snapshots of recurrent state can be described and stored, "
            "but sequences cannot run on them yet; open the store with device=None to attach "
            "the pool of an engine that runs them"
        )


def _open_disk(
    directory: Path | None, spec: CacheSpec, namespace: Namespace, options: Options
) -> SsdTier | None:
    if directory is None or options.disk is None:
        if directory is not None:
            log.warning("disk=None: the directory %s is not used", directory)
        return None
    return SsdTier.open(
        directory,
        capacity_bytes=parse_bytes(options.disk, name="disk"),
        slot_payload_bytes=spec.slot_bytes,
        codec=options.codec,
        io_timeout_s=options.io_timeout_s,
        namespaces={namespace.digest: namespace.description},
    )


def _host_pages(spec: CacheSpec, options: Options) -> int:
    if options.host is None:
        return _MIN_HOST_PAGES
    budget = parse_bytes(options.host, name="host")
    pages = budget // spec.slot_bytes
    if pages < _MIN_HOST_PAGES:
        least = _MIN_HOST_PAGES * spec.slot_bytes
        raise CapacityError(
            f"host tier: {format_bytes(budget)} holds {pages} pages of "
            f"{format_bytes(spec.slot_bytes)}, but transfers need {_MIN_HOST_PAGES}; give at "
            f"least {format_bytes(least)}, or host=None for the minimum"
        )
    return pages


def _boundary_tokens(spec: CacheSpec, boundary_pages: int) -> int:
    """Return the least common multiple of the page sizes that is at least so many pages."""
    unit = int(np.lcm.reduce([group.page_tokens for group in spec.groups]))
    wanted = boundary_pages * spec.groups[spec.anchor].page_tokens
    return -(-wanted // unit) * unit


def _read_index(disk: SsdTier, index: PrefixIndex) -> None:
    """Enter every page on disk, of whatever namespace: all of them share the room."""
    records = disk.pages()
    usage: list[np.ndarray[tuple[int, int], np.dtype[np.int64]]] = []
    while batch := list(islice(records, _READ_AT_ONCE)):
        infos = [info for info, _, _ in batch]
        rows = index.insert(
            key_array(info.key for info in infos),
            key_array(info.parent for info in infos),
            group=np.asarray([info.group for info in infos], np.int64),
            end_tokens=np.asarray([info.end_token for info in infos], np.int64),
            num_tokens=np.asarray([info.num_tokens for info in infos], np.int64),
            flags=np.asarray([info.flags for info in infos], np.int64),
        )
        there = rows >= 0
        index.set_resident(rows[there], Tier.DISK)
        used = np.asarray([(hits, used_s) for _, hits, used_s in batch], np.int64)
        usage.append(np.column_stack([rows, used])[there])
    if usage:  # in one call: it orders all pages by their last use
        rows, hits, used_s = np.concatenate(usage).T
        index.restore_usage(rows, hits=hits, used_s=used_s)
