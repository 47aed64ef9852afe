"""Speed and memory of the control plane: the prefix index alone, on one core.

For each number of pages, in a fresh process: builds an index of conversations (paths of 8
to 256 pages, every second one continuing an earlier path somewhere), all pages resident
on disk and every eighth path in host memory as well; then matches random whole paths, each
followed by some new tokens as in a conversation's next turn.

* look-up: one page of a match: found by its 32-byte key, part of the longest prefix, and
  touched (recency, use count, eviction order); hashing the tokens is not part of it.
* insert: one page entered below its parent and made resident.
* eviction: one page chosen, dropped and forgotten (64 at a time, from disk).
* bytes a page: growth of the process's resident memory, divided by the pages.

Times are CPU seconds of the one thread that does the work, so that other load on the
machine counts little; look-up rates are medians of several rounds over fresh random
paths, after a warm-up round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tierkv.control_plane.index import PrefixIndex
from tierkv.control_plane.match import match
from tierkv.identity.keys import KeyChain
from tierkv.identity.spec import CacheSpec, GroupKind, LayerGroup, kv_components
from tierkv.tiers import Tier

PAGE_TOKENS, NEW_TOKENS = 16, 10
SHORTEST, LONGEST = 8, 256
ROUND_PAGES = 200_000
SPEC = CacheSpec(
    groups=(
        LayerGroup(
            name="full",
            kind=GroupKind.FULL,
            layers=tuple(range(32)),
            components=kv_components(8, 128),
            dtype="bfloat16",
            page_tokens=PAGE_TOKENS,
        ),
    )
)
EVICTIONS = 20_000


def resident_bytes() -> int:
    """Return this process's resident memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


class Workload:
    """An index full of conversations, and random paths through it."""

    def __init__(self, pages: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.pages = pages
        self.leaves = np.zeros(pages // SHORTEST + 1, np.int32)
        self.paths = 0
        self.insert_s = 0.0
        self.slowest_insert_s = 0.0
        before = resident_bytes()
        self.index = PrefixIndex(pages + 1)
        done = 0
        while done < pages:
            done += self._add_path(min(int(self.rng.integers(SHORTEST, LONGEST + 1)), pages - done))
        self.bytes_per_page = (resident_bytes() - before) / pages

    def _add_path(self, length: int) -> int:
        keys = self.rng.integers(0, 2**64, (length, 4), np.uint64).view(np.uint8)
        parents, first = np.zeros_like(keys), 0
        parents[1:] = keys[:-1]
        if self.paths % 2:  # continue an earlier conversation after one of its pages
            earlier = self.index.path(int(self.leaves[self.rng.integers(self.paths)]))
            first = int(self.rng.integers(1, len(earlier) + 1))
            parents[0] = self.index.keys(earlier[first - 1 : first])[0]
        ends = np.arange(first + 1, first + 1 + length) * PAGE_TOKENS
        start = time.thread_time()
        rows = self.index.insert(
            keys, parents, group=0, end_tokens=ends, num_tokens=PAGE_TOKENS, now=1
        )
        self.index.set_resident(rows, Tier.DISK)
        took = time.thread_time() - start
        self.insert_s += took
        if self.paths:  # the first call maps the key table's memory, once and for all
            self.slowest_insert_s = max(self.slowest_insert_s, took)
        if self.paths % 8 == 0:
            self.index.set_resident(rows, Tier.HOST, rows)
        self.leaves[self.paths] = rows[-1]
        self.paths += 1
        return length

    def random_chains(self, pages: int) -> list[KeyChain]:
        """Return the key chains of random whole paths, ``pages`` pages or a few more."""
        chains: list[KeyChain] = []
        while pages > 0:
            leaf = int(self.leaves[self.rng.integers(self.paths)])
            keys = self.index.keys(self.index.path(leaf))
            chain = KeyChain(bytes(32), PAGE_TOKENS)
            chain._digests = [key.tobytes() for key in keys]  # hashed beforehand, so to say
            chains.append(chain)
            pages -= len(chain)
        return chains

    def look_up(self, chains: list[KeyChain]) -> float:
        """Match and touch every path; return pages a second."""
        index, found = self.index, 0
        tokens = np.zeros((max(map(len, chains), default=0) + 1) * PAGE_TOKENS, np.uint32)
        start = time.thread_time()
        for chain in chains:
            turn = tokens[: len(chain) * PAGE_TOKENS + NEW_TOKENS]
            matched = match(index, SPEC, [chain], turn, limit=len(turn) - 1)
            index.touch(matched.groups[0].rows, now=2)
            found += len(matched.groups[0].rows)
        took = time.thread_time() - start
        assert found == sum(map(len, chains)), "a page was not found"
        return found / max(took, 1e-9)

    def evict(self, count: int) -> float:
        """Evict pages from disk; return pages a second."""
        index, done = self.index, 0
        start = time.thread_time()
        while done < count:
            rows = index.victims(Tier.DISK, 64)
            index.clear_resident(rows, Tier.DISK)
            index.unpin(rows, Tier.DISK)
            done += len(rows)
        return done / (time.thread_time() - start)


def measure(pages: int, *, rounds: int, seed: int) -> dict[str, float]:
    """Build, look up, evict; return one row of the result."""
    Workload(LONGEST, seed).look_up([])  # load code before memory is counted
    work = Workload(pages, seed)
    size = min(ROUND_PAGES, pages)
    batches = [work.random_chains(size) for _ in range(rounds + 1)]
    rates = [work.look_up(chains) for chains in batches][1:]
    row = {
        "pages": pages,
        "lookups_per_s": statistics.median(rates),
        "lookups_per_s_min": min(rates),
        "lookups_per_s_max": max(rates),
        "inserts_per_s": pages / work.insert_s,
        "slowest_insert_ms": work.slowest_insert_s * 1e3,
        "evictions_per_s": work.evict(min(EVICTIONS, pages // 2)),
        "bytes_per_page": work.bytes_per_page,
        "pages_per_path": float(np.mean([len(chain) for chain in batches[0]])),
    }
    return row


def measure_apart(pages: int, args: argparse.Namespace) -> dict[str, float]:
    """Measure in a process of its own, so that memory is counted from zero."""
    command = [sys.executable, __file__, "--child", "--pages", str(pages)]
    command += ["--rounds", str(args.rounds), "--seed", str(args.seed)]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    row: dict[str, float] = json.loads(result.stdout)
    return row


def table(rows: list[dict[str, float]]) -> Iterator[str]:
    """Yield the lines of the printed table."""
    yield (
        f"{'pages':>10} {'look-ups/s (min .. max)':>38} {'inserts/s':>11} "
        f"{'evictions/s':>12} {'bytes/page':>11} {'pages/path':>11}"
    )
    for row in rows:
        spread = (
            f"{row['lookups_per_s']:,.0f} "
            f"({row['lookups_per_s_min']:,.0f} .. {row['lookups_per_s_max']:,.0f})"
        )
        yield (
            f"{row['pages']:>10,} {spread:>38} {row['inserts_per_s']:>11,.0f} "
            f"{row['evictions_per_s']:>12,.0f} {row['bytes_per_page']:>11.0f} "
            f"{row['pages_per_path']:>11.0f}"
        )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pages", type=int, nargs="+", default=[10_000, 1_000_000, 5_000_000], metavar="N"
    )
    parser.add_argument("--rounds", type=int, default=7, help="look-up rounds (default 7)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if min(args.pages) < LONGEST or args.rounds < 1:
        parser.error(f"--pages must be at least {LONGEST}, --rounds at least 1")
    if args.child:
        print(json.dumps(measure(args.pages[0], rounds=args.rounds, seed=args.seed)))
        return
    print((__doc__ or "").strip(), end="\n\n")
    rows = []
    for pages in args.pages:
        print(f"measuring {pages:,} pages ...", file=sys.stderr, flush=True)
        rows.append(measure_apart(pages, args))
    print("\n".join(table(rows)))
    if args.json:
        args.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
