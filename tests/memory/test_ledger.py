"""The ledger never exceeds a limit at any moment, whoever takes and gives."""

from __future__ import annotations

import random
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.io.errors import OutOfMemoryError
from hetero.memory.budget import Ledger, LedgerEvent


def test_take_give_peak_and_holders() -> None:
    ledger = Ledger({"gpu": 100, "cpu": 1000})
    ledger.take("gpu", "ring", 60)
    ledger.take("gpu", "kv", 20)
    ledger.take("gpu", "ring", 10)
    assert (ledger.used("gpu"), ledger.free("gpu"), ledger.limit("gpu")) == (90, 10, 100)
    assert list(ledger.holders("gpu").items()) == [("ring", 70), ("kv", 20)]
    ledger.give("gpu", "ring", 70)
    assert ledger.holders("gpu") == {"kv": 20}
    assert (ledger.used("gpu"), ledger.peak("gpu")) == (20, 90)
    assert ledger.used("cpu") == 0
    assert ledger.tiers() == ("gpu", "cpu")
    assert ledger.can_take("gpu", 80)
    assert not ledger.can_take("gpu", 81)


def test_what_does_not_fit_is_refused_whole() -> None:
    ledger = Ledger({"cpu": 10 << 20})
    ledger.take("cpu", "kv", 1 << 20)
    ledger.take("cpu", "ring", 6 << 20)
    with pytest.raises(OutOfMemoryError) as caught:
        ledger.take("cpu", "logits", 4 << 20)
    error = caught.value
    assert (error.tier, error.requested_nbytes, error.free_nbytes) == ("cpu", 4 << 20, 3 << 20)
    assert error.largest_holder == "ring"
    text = str(error)
    for part in ("cpu budget", "'logits' asks for 4.0 MiB", "3.0 MiB of 10.0 MiB", "'ring' with 6.0 MiB", "1.0 MiB"):
        assert part in text
    assert ledger.used("cpu") == 7 << 20
    assert "logits" not in ledger.holders("cpu")
    ledger.take("cpu", "logits", 3 << 20)  # exactly full is allowed


def test_out_of_memory_with_no_holder() -> None:
    with pytest.raises(OutOfMemoryError, match="nothing is held yet") as caught:
        Ledger({"gpu": 5}).take("gpu", "ring", 6)
    assert caught.value.largest_holder is None


def test_hold_gives_back_when_the_body_raises() -> None:
    ledger = Ledger({"cpu": 10})
    with pytest.raises(KeyError), ledger.hold("cpu", "scratch", 10):
        assert ledger.used("cpu") == 10
        raise KeyError
    assert ledger.used("cpu") == 0


def test_misuse_is_caught() -> None:
    ledger = Ledger({"cpu": 10})
    ledger.take("cpu", "a", 5)
    with pytest.raises(AssertionError):
        ledger.give("cpu", "a", 6)
    with pytest.raises(AssertionError):
        ledger.give("cpu", "b", 1)
    with pytest.raises(AssertionError):
        ledger.take("cpu", "a", -1)
    with pytest.raises(KeyError):
        ledger.take("tape", "a", 1)


def test_notes_are_not_budget() -> None:
    ledger = Ledger({"cpu": 10})
    ledger.note("baseline", 400)
    assert ledger.notes() == {"baseline": 400}
    assert ledger.used("cpu") == 0


def test_observer_sees_every_event_after_it_is_booked() -> None:
    seen: list[LedgerEvent] = []

    def observe(ledger: Ledger, event: LedgerEvent) -> None:
        assert ledger.used(event.tier) == event.used_nbytes
        seen.append(event)

    ledger = Ledger({"cpu": 10}, observer=observe)
    ledger.take("cpu", "a", 7)
    with pytest.raises(OutOfMemoryError):
        ledger.take("cpu", "b", 4)
    ledger.give("cpu", "a", 2)
    assert seen == [LedgerEvent("take", "cpu", "a", 7, 7), LedgerEvent("give", "cpu", "a", 2, 5)]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 60), st.booleans()), max_size=60))
def test_any_sequence_equals_a_plain_model(operations: list[tuple[str, int, bool]]) -> None:
    ledger, held, peak = Ledger({"cpu": 100}), dict.fromkeys("abc", 0), 0
    for holder, nbytes, is_take in operations:
        if not is_take:
            nbytes = min(nbytes, held[holder])
            ledger.give("cpu", holder, nbytes)
            held[holder] -= nbytes
        elif sum(held.values()) + nbytes > 100:
            with pytest.raises(OutOfMemoryError):
                ledger.take("cpu", holder, nbytes)
        else:
            ledger.take("cpu", holder, nbytes)
            held[holder] += nbytes
        peak = max(peak, sum(held.values()))
        assert ledger.used("cpu") == sum(held.values())
        assert ledger.peak("cpu") == peak
        assert {k: v for k, v in ledger.holders("cpu").items() if v} == {k: v for k, v in held.items() if v}


class SlowInt(int):
    """A size whose addition lets other threads run, so that a check outside the lock is caught."""

    def __radd__(self, other: int) -> int:
        time.sleep(0)
        return int(other) + int(self)


def test_threads_never_exceed_the_limit() -> None:
    limit, worst, num_events = 1000, [0], [0]

    def observe(ledger: Ledger, event: LedgerEvent) -> None:
        # Every event sees a state in which the parts add up: a lost update or a check outside the lock would not.
        assert sum(ledger.holders("cpu").values()) == event.used_nbytes <= limit
        worst[0] = max(worst[0], event.used_nbytes)
        num_events[0] += 1

    ledger, failures, num_refused = Ledger({"cpu": limit}, observer=observe), [], [0]

    def work(seed: int) -> None:
        generator, mine = random.Random(seed), 0
        try:
            for _ in range(400):
                nbytes = SlowInt(generator.randrange(0, 300))
                if generator.random() < 0.5 and mine >= nbytes:
                    ledger.give("cpu", f"t{seed}", nbytes)
                    mine -= nbytes
                    continue
                try:
                    ledger.take("cpu", f"t{seed}", nbytes)
                    mine += int(nbytes)
                except OutOfMemoryError:
                    num_refused[0] += 1
            ledger.give("cpu", f"t{seed}", mine)
        except BaseException as error:
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert failures == []
    assert ledger.used("cpu") == 0
    assert ledger.peak("cpu") == worst[0]
    assert num_refused[0] > 0 and num_events[0] > 1000
