"""Several processes: one owner, readers beside it, forks, and ends without a close."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from tierkv.errors import ForkError, StoreLockedError
from tierkv.storage.aligned import aligned_empty
from tierkv.storage.lock import is_locked, read_owner
from tierkv.storage.ssd import ReadStatus, WriteStatus
from tierkv.storage.testing import TEST_NAMESPACE, make_page, page_bytes, page_key

SIZE = 16 << 10
HIT = ReadStatus.HIT

PRELUDE = """
import os, sys
from tierkv.storage.ssd import SsdTier
from tierkv.storage.testing import make_page, page_key
from tierkv.storage.aligned import aligned_empty
SIZE = 16 << 10
def open_tier(**options):
    return SsdTier.open(
        sys.argv[1], capacity_bytes=16 * (SIZE + 4096), slot_payload_bytes=SIZE, **options
    )
"""


def child(code: str, path, **options) -> subprocess.CompletedProcess:
    """Run code in another interpreter, with helpers at hand."""
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code), str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **options,
    )


def read(tier, *numbers):
    outs = [aligned_empty(SIZE) for _ in numbers]
    statuses = tier.read([page_key(n) for n in numbers], outs, namespace=TEST_NAMESPACE)
    for number, out, status in zip(numbers, outs, statuses, strict=True):
        if status is HIT:
            assert np.array_equal(out, page_bytes(number, SIZE))
    return statuses


def test_storage_imports_no_torch(fast_dir):
    result = child(
        """
        import tierkv.storage.admin, tierkv.storage.arena
        assert "torch" not in sys.modules, "torch was imported"
        """,
        fast_dir,
    )
    assert result.returncode == 0, result.stderr


def test_a_second_owner_is_refused(open_tier, fast_dir):
    tier = open_tier()
    with pytest.raises(StoreLockedError, match=r"close that store first$") as caught:
        open_tier()
    assert caught.value.pid == os.getpid()
    assert caught.value.host
    assert caught.value.since
    result = child("open_tier()", fast_dir / "store")
    assert "StoreLockedError" in result.stderr
    assert str(os.getpid()) in result.stderr
    tier.close()
    assert open_tier().put([make_page(1, SIZE)]).wait(20)


def test_the_lock_dies_with_its_process(open_tier, fast_dir):
    result = child(
        """
        tier = open_tier()
        tier.put([make_page(n, SIZE) for n in range(4)]).wait(20)
        os.kill(os.getpid(), 9)
        """,
        fast_dir / "store",
    )
    assert result.returncode == -9
    assert not is_locked(str(fast_dir / "store" / "lock"))
    assert read(open_tier(), *range(4)) == [HIT] * 4


def test_a_reader_beside_a_live_writer(open_tier, fast_dir):
    tier = open_tier()
    tier.put([make_page(n, SIZE) for n in range(4)]).wait(20)
    store = fast_dir / "store"
    quiet = [p for p in store.rglob("*") if p.is_file() and p.name != "lock.mdb"]
    before = {p: p.stat().st_mtime_ns for p in quiet}
    result = child(
        """
        tier = open_tier(read_only=True)
        outs = [aligned_empty(SIZE) for _ in range(4)]
        print(tier.read([page_key(n) for n in range(4)], outs))
        print(len(list(tier.pages())), tier.verify().ok)
        tier.close()
        """,
        store,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("'hit'") == 4
    assert "4 True" in result.stdout
    assert {p: p.stat().st_mtime_ns for p in quiet} == before
    assert tier.put([make_page(9, SIZE)]).wait(20) == [WriteStatus.WRITTEN]


def test_a_reader_sees_what_the_writer_adds_and_takes_away(open_tier, fast_dir):
    tier = open_tier(pages=4)
    tier.put([make_page(n, SIZE) for n in range(4)]).wait(20)
    code = """
        tier = open_tier(read_only=True)
        print("open", flush=True)
        sys.stdin.readline()
        outs = [aligned_empty(SIZE) for _ in range(2)]
        print([str(s) for s in tier.read([page_key(0), page_key(1)], outs)])
        print(sorted(info.end_token for info, _, _ in tier.pages()))
        report = tier.verify()
        print(report.bad, report.index_mismatches)
        tier.close()
        """
    with subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code), str(fast_dir / "store")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        tier.delete([page_key(0)])
        tier.flush()
        assert tier.put([make_page(7, SIZE)]).wait(20) == [WriteStatus.WRITTEN]
        out, _ = process.communicate("go\n", timeout=60)
    assert out.splitlines() == ["['miss', 'hit']", "[1, 2, 3, 7]", "0 0"]


def test_a_reader_in_the_same_process(open_tier):
    """LMDB opens a file once a process, so this reader goes by the slot headers."""
    tier = open_tier()
    tier.put([make_page(n, SIZE) for n in range(4)]).wait(20)
    assert read(open_tier(read_only=True), *range(4)) == [HIT] * 4


def test_a_fork_is_refused_and_harms_nothing(open_tier):
    tier = open_tier()
    tier.put([make_page(n, SIZE) for n in range(3)]).wait(20)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            calls = (
                tier.flush,
                tier.stats,
                tier.check,
                tier.close,
                lambda: tier.put([make_page(9, SIZE)]),
                lambda: tier.read([page_key(1)], [aligned_empty(SIZE)]),
                lambda: tier.contains([page_key(1)]),
                lambda: tier.delete([page_key(1)]),
                lambda: list(tier.pages()),
                tier.verify,
            )
            for call in calls:
                try:
                    call()
                except ForkError:
                    continue
                os._exit(2)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert read(tier, 0, 1, 2) == [HIT] * 3
    assert tier.put([make_page(9, SIZE)]).wait(20) == [WriteStatus.WRITTEN]
    assert tier.flush().ok


def test_a_forked_child_does_not_keep_the_directory_locked(open_tier, fast_dir):
    """The lock is shared with children; one that outlives its parent must not hold it."""
    read_end, write_end = os.pipe()
    result = child(
        f"""
        tier = open_tier()
        tier.put([make_page(1, SIZE)]).wait(20)
        if os.fork() == 0:
            for fd in (0, 1, 2):
                os.close(fd)
            os.read({read_end}, 1)
            os._exit(0)
        os.kill(os.getpid(), 9)
        """,
        fast_dir / "store",
        pass_fds=[read_end],
    )
    try:
        assert result.returncode == -9
        assert read(open_tier(), 1) == [HIT]
    finally:
        os.close(write_end)
        os.close(read_end)


def test_an_interpreter_that_ends_without_close_does_not_hang(open_tier, fast_dir):
    result = child(
        """
        tier = open_tier()
        tier.put([make_page(n, SIZE) for n in range(4)])
        """,
        fast_dir / "store",
    )
    assert result.returncode == 0, result.stderr
    tier = open_tier()
    assert read(tier, *range(4)) == [HIT] * 4
    assert tier.stats().clean_open


def test_an_interpreter_that_ends_while_io_hangs_does_not_hang(open_tier, fast_dir):
    result = child(
        """
        import tierkv.storage.lifetime as lifetime
        from tierkv.storage.testing import FaultyBackend, Gate
        lifetime.EXIT_TIMEOUT_S = 0.05
        backend = FaultyBackend()
        gate = Gate()
        tier = open_tier(backend=backend)
        tier.put([make_page(1, SIZE)]).wait(20)
        backend.inject("pwritev", gate)
        tier.put([make_page(2, SIZE)])
        gate.reached.wait(20)
        """,
        fast_dir / "store",
    )
    assert result.returncode == 0, result.stderr
    assert read(open_tier(), 1) == [HIT]


def test_exit_at_once(open_tier, fast_dir):
    result = child(
        """
        tier = open_tier()
        tier.put([make_page(n, SIZE) for n in range(4)]).wait(20)
        os._exit(3)
        """,
        fast_dir / "store",
    )
    assert result.returncode == 3
    assert read(open_tier(), *range(4)) == [HIT] * 4


def test_a_forgotten_tier_is_closed_and_reported(open_tier, fast_dir):
    tier = open_tier(fast_dir / "other")
    tier.close()
    from tierkv.storage.ssd import SsdTier

    options = {"capacity_bytes": 16 * (SIZE + 4096), "slot_payload_bytes": SIZE}
    forgotten = SsdTier.open(fast_dir / "store", **options)
    forgotten.put([make_page(1, SIZE)]).wait(20)
    with pytest.warns(ResourceWarning, match="not closed"):
        del forgotten
    assert open_tier().stats().clean_open


def test_permission_denied_is_a_clear_error(open_tier, fast_dir):
    if os.getuid() != 0:
        pytest.skip("needs root to become somebody else")
    open_tier().close()
    result = child(
        """
        os.setuid(65534)
        open_tier()
        """,
        fast_dir / "store",
    )
    assert "tierkv.errors.StoreError" in result.stderr
    assert "ermission" in result.stderr


def test_descriptors_run_out(open_tier, fast_dir):
    result = child(
        """
        import resource
        tier = open_tier()
        tier.put([make_page(1, SIZE)]).wait(20)
        tier.close()
        tier = open_tier()
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        out = aligned_empty(SIZE)
        used = len(os.listdir("/proc/self/fd")) - 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
        print(*tier.read([page_key(1)], [out]))
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        print(*tier.read([page_key(1)], [out]))
        tier.close()
        """,
        fast_dir / "store",
    )
    assert result.stdout.split() == ["error", "hit"], result.stderr


def test_file_size_limit_is_no_space(open_tier, fast_dir):
    result = child(
        """
        import resource
        tier = open_tier(slab_bytes=4 * (SIZE + 4096))
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
        print(*tier.put([make_page(1, SIZE)]).wait(20))
        os._exit(0)
        """,
        fast_dir / "store",
    )
    assert result.stdout.split() == ["no_space"], result.stderr
    tier = open_tier()
    assert tier.put([make_page(1, SIZE)]).wait(20) == [WriteStatus.WRITTEN]


def test_the_owner_is_named_in_the_lock(open_tier, fast_dir):
    open_tier()
    assert read_owner(str(fast_dir / "store" / "lock")).pid == os.getpid()
    (fast_dir / "garbage").write_bytes(b"\xff\x00")
    assert read_owner(str(fast_dir / "garbage")).pid is None
