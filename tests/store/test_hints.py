"""Hints and pins: what the application knows outweighs the policy."""

import pytest
from toy_model import FULL, turn

from tierkv import InvalidInputError, PinError


def talk(number, length=12):
    return [1000 * number + i for i in range(length)]


def test_pages_of_an_ended_session_go_first(open_store):
    # 9 device pages and the least of a host tier, 8; the talks have 3 pages each.
    store = open_store(device=9, path=None, disk=None, host=None)
    turn(store, talk(1))
    turn(store, talk(2))
    store.hint(talk(2), end_of_session=True)  # the younger one
    for number in (3, 4, 5):
        turn(store, talk(number))
    turn(store, talk(6, 16))
    assert turn(store, talk(1) + [9]).total == 12
    assert turn(store, talk(2) + [9]).total < 12


def test_a_shared_document_outlives_an_ended_session(open_store):
    store = open_store()
    document = talk(1, 16)
    turn(store, document + [1, 1, 1, 1])
    turn(store, document + [2, 2, 2, 2])
    assert store.hint(document + [1, 1, 1, 1], end_of_session=True) == 1
    assert turn(store, document + [3]).total == 16


def test_a_time_to_live_protects_and_then_gives_up(open_store):
    now = [0.0]
    store = open_store(device=9, host=None, path=None, disk=None, clock=lambda: now[0])
    turn(store, talk(1))
    assert store.hint(talk(1), ttl_s=60) == 3
    for number in range(2, 8):
        turn(store, talk(number, 8))
    assert turn(store, talk(1)[:12] + [5]).total == 12
    now[0] = 61.0
    for number in range(10, 14):
        turn(store, talk(number, 20))
    assert turn(store, talk(1) + [5]).total == 0


def test_pinned_pages_stay_until_their_owner_lets_go(open_store):
    store = open_store(device=9, host=None, path=None, disk=None)
    turn(store, talk(1))
    assert store.pin(talk(1), owner="me") == 3
    assert store.stats().tiers["device"].pinned == 3
    for number in range(2, 8):
        turn(store, talk(number, 16))
    assert turn(store, talk(1) + [5]).device == 12
    assert store.unpin("me") == 3
    assert store.stats().tiers["device"].pinned == 0


def test_pins_expire_by_the_clock_given(open_store):
    now = [0.0]
    store = open_store(clock=lambda: now[0])
    turn(store, talk(1))
    store.pin(talk(1), owner="me", ttl_s=5)
    now[0] = 6.0
    turn(store, talk(2))
    assert store.stats().tiers["device"].pinned == 0


def test_pins_leave_half_of_a_tier_evictable(open_store):
    store = open_store(FULL, device=8, host=None, path=None, disk=None)
    turn(store, talk(1, 24))
    with pytest.raises(PinError, match="at most 4 of 8"):
        store.pin(talk(1, 24), owner="greedy")
    store.check()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.pin([1], owner=""), "name an owner"),
        (lambda s: s.pin(talk(1), owner="me", ttl_s=0), "ttl_s must be positive"),
        (lambda s: s.hint(talk(1), ttl_s=-1), "ttl_s must be positive"),
    ],
)
def test_senseless_hints_are_refused(open_store, call, message):
    store = open_store()
    turn(store, talk(1))
    with pytest.raises(InvalidInputError, match=message):
        call(store)


def test_hints_for_unknown_tokens_concern_nothing(open_store):
    store = open_store()
    assert store.hint([1, 2, 3], end_of_session=True) == 0
    assert store.pin([1, 2, 3], owner="me") == 0
