"""The race detector: what is ordered passes, what is not is named. Events are stand-ins; no clock, no thread."""

from __future__ import annotations

import pytest

from hetero.memory.races import RaceDetector, RaceError

A, B, C, HALF = (0x1000, 100), (0x2000, 100), (0x3000, 100), (0x1032, 100)


class FakeEvent:
    def __init__(self, queue: str, number: int) -> None:
        self.queue, self.number = queue, number
        self.clock = {queue: number}
        self.has_passed = False

    def query(self) -> bool:
        return self.has_passed


class Program:
    """Issues numbered events to a detector."""

    def __init__(self) -> None:
        self.races = RaceDetector()
        self._counts: dict[str, int] = {}

    def event(self, queue: str) -> FakeEvent:
        self._counts[queue] = self._counts.get(queue, 0) + 1
        return FakeEvent(queue, self._counts[queue])

    def compute(self, *uses: tuple[int, int]) -> FakeEvent:
        event = self.event("compute")
        self.races.used(uses, event)
        return event

    def up(self, dst: tuple[int, int], src: tuple[int, int], *after: FakeEvent) -> FakeEvent:
        event = self.event("to device")
        self.races.copied(dst, src, event, after)
        return event

    def down(self, dst: tuple[int, int], src: tuple[int, int], *after: FakeEvent) -> FakeEvent:
        event = self.event("from device")
        self.races.copied(dst, src, event, after)
        return event


@pytest.fixture
def program() -> Program:
    return Program()


def test_copy_over_what_compute_reads(program: Program) -> None:
    program.compute(A)
    with pytest.raises(RaceError, match=r"\[0x1032, \+100 bytes\).*compute reads \[0x1000, \+100 bytes\)"):
        program.up(HALF, C)
    program.up(B, C)  # elsewhere is fine


def test_waiting_for_that_event_orders(program: Program) -> None:
    program.up(A, C, program.compute(A))


def test_waiting_for_a_later_compute_event_orders(program: Program) -> None:
    program.compute(A)
    program.up(A, C, program.compute(B))


def test_waiting_for_an_earlier_compute_event_does_not(program: Program) -> None:
    earlier = program.compute(B)
    program.compute(A)
    with pytest.raises(RaceError):
        program.up(A, C, earlier)


def test_a_passed_event_orders(program: Program) -> None:
    program.compute(A).has_passed = True
    program.up(A, C)


def test_an_earlier_copy_of_the_same_queue_that_waited_orders(program: Program) -> None:
    use = program.compute(A, B)
    program.up(B, C, use)
    program.up(A, C)


def test_a_copy_that_waited_orders_through_the_other_queue(program: Program) -> None:
    use = program.compute(A)
    read_back = program.down(C, A, use)
    program.up(A, B, read_back)


def test_copies_of_one_queue_are_in_order(program: Program) -> None:
    program.up(A, C)
    program.up(A, B)


def test_copies_of_two_queues_are_not(program: Program) -> None:
    up = program.up(A, C)
    with pytest.raises(RaceError, match="a copy to device writes"):
        program.down(B, A)  # reads what is being written
    program.down(B, A, up)
    with pytest.raises(RaceError, match="a copy from device reads"):
        program.up(A, C)  # overwrites what is being read


def test_two_readers_do_not_collide(program: Program) -> None:
    program.compute(A)
    program.down(B, A)


def test_a_refused_copy_leaves_no_trace(program: Program) -> None:
    use = program.compute(A)
    with pytest.raises(RaceError):
        program.up(A, C)
    use.has_passed = True
    program.races.retired(A, is_device_memory=True)
    program.races.retired(C, is_device_memory=False)


def test_retiring_what_is_in_use(program: Program) -> None:
    use = program.compute(A)
    with pytest.raises(RaceError, match=r"is retired while compute reads"):
        program.races.retired(HALF, is_device_memory=True)
    use.has_passed = True
    copy = program.up(A, C)
    for where in (A, C):
        with pytest.raises(RaceError, match="is retired while a copy to device"):
            program.races.retired(where, is_device_memory=True)
    copy.has_passed = True
    program.races.retired(A, is_device_memory=True)


def test_reading_retired_bytes(program: Program) -> None:
    program.races.retired(A, is_device_memory=True)
    with pytest.raises(RaceError, match="was retired and not filled since"):
        program.down(C, HALF)
    program.up(A, C).has_passed = True
    program.down(C, A)


def test_bytes_are_retired_until_every_one_is_filled(program: Program) -> None:
    program.races.retired((0, 300), is_device_memory=True)
    program.up((100, 100), C).has_passed = True
    program.down(B, (100, 100)).has_passed = True
    for start in (0, 99, 200, 101):
        with pytest.raises(RaceError):
            program.down(B, (start, 100))


def test_host_memory_may_be_filled_without_a_copy(program: Program) -> None:
    program.races.retired(C, is_device_memory=False)
    program.up(A, C)


def test_forgotten_memory_may_hold_something_else(program: Program) -> None:
    program.races.retired(A, is_device_memory=True)
    program.races.forget(A)
    program.up(B, A)
