"""Making room: nobody waits for room that only they themselves could give."""

import time

from toy_model import turn


def test_loading_from_a_full_host_tier_does_not_wait_for_itself(open_store):
    """All of host memory was pinned by the prefix being loaded, so nothing could leave it.

    The pages leaving the device counted as pages on their way, and the load waited for its
    own evictions until the deadline.
    """
    store = open_store(device=13, host=8, io_timeout_s=20.0)
    talks = [[start] * 44 for start in (1, 2, 3)]
    started = time.monotonic()
    found = [0, 0, 0]
    for which in (0, 1, 2, 2, 1, 0, 0, 1, 2):
        talks[which].append(7)
        found[which] += turn(store, talks[which]).total
    assert time.monotonic() - started < 15
    assert all(found), "some talk was never found again"
