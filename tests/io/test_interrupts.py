"""Locks that an interrupt cannot leave locked: interrupted at every call there is."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from hetero.io.interrupts import Condition, Latch
from hetero.io.operation import IOFuture
from tests.interrupting import InterruptAt


def interrupt_everywhere(action: Callable[[], object], check: Callable[[], None]) -> None:
    """Interrupt `action` at its first call, then at its second, and so on; `check` after each."""
    number = 1
    while True:
        try:
            with InterruptAt(number) as interrupter:
                action()
        except KeyboardInterrupt:
            check()
            number += 1
        else:
            assert number > 1 and interrupter.num_seen < number
            return


def taken_by_another_thread(lock: threading.Lock | threading.RLock | Condition) -> bool:
    """Whether another thread can take the lock, which is given back."""
    taken: list[bool] = []

    def take() -> None:
        taken.append(lock.acquire(timeout=1.0))
        if taken[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return taken[0]


@pytest.mark.parametrize("make_lock", [threading.Lock, threading.RLock])
def test_a_condition_is_free_after_an_interrupt(make_lock: Callable[[], threading.Lock]) -> None:
    condition = Condition(make_lock())

    def enter() -> None:
        with condition:
            condition.wait(0.001)

    def is_free() -> None:
        assert taken_by_another_thread(condition)

    interrupt_everywhere(enter, is_free)


def test_a_latch_stays_as_it_is_after_an_interrupt() -> None:
    latch = Latch()
    latch.open()
    interrupt_everywhere(latch.wait, latch.wait)


def test_a_future_can_be_resolved_after_an_interrupt() -> None:
    futures = [IOFuture(lambda _: False, 0)]

    def ask() -> None:
        futures[-1].cancel()
        futures[-1].done()
        with pytest.raises(TimeoutError):
            futures[-1].exception(timeout=0.001)

    def resolve() -> None:
        thread = threading.Thread(target=futures[-1].set_result, args=(7,), daemon=True)
        thread.start()
        thread.join(2.0)
        assert not thread.is_alive()
        assert futures[-1].result(timeout=0) == 7
        futures.append(IOFuture(lambda _: False, 0))

    interrupt_everywhere(ask, resolve)
