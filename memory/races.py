"""Finds missing waits: the order a program asked for, checked against the ranges it touches. Integers and events only.

Note [happens before]
    Whether two accesses really collide depends on luck, so the detector asks whether anything *orders* them, at the
    moment a copy is issued. Every queue is first in, first out and numbers its events, so "has waited for" is one
    number per queue: an event's `clock`. A copy's clock is that of the copy before it in its queue and of every event
    it waits for. An event that has passed orders by itself: the host has seen it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hetero.io.errors import HeteroError

Range = tuple[int, int]


class RaceError(HeteroError):
    """Two accesses to one range with nothing to order them: a bug in hetero, not in the model."""


class OrderedEvent(Protocol):
    """An event with its place: its number in its queue ("compute", "to device", "from device"), counted from 1."""

    queue: str
    number: int
    clock: dict[str, int]
    """Queue -> the number up to which that queue's work is over when this event passes, itself included."""

    def query(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class _Access:
    what: str
    range: Range
    is_write: bool
    event: OrderedEvent


class RaceDetector:
    """Keeps what is in flight and what is retired. Not thread-safe: the device calls it under its lock."""

    def __init__(self) -> None:
        self._in_flight: list[_Access] = []
        self._retired: list[Range] = []
        self._clocks: dict[str, dict[str, int]] = {}  # of the last copy of each queue

    def used(self, ranges: Sequence[Range], event: OrderedEvent) -> None:
        """Compute reads `ranges` until `event` has passed."""
        self._prune()
        self._in_flight += [_Access("compute reads", each, False, event) for each in ranges]

    def copied(self, dst: Range, src: Range, event: OrderedEvent, after: Sequence[object]) -> None:
        """A copy is issued that waits for `after`. Sets its event's clock. Raises RaceError, with nothing noted, when
        what it touches is not ordered before it."""
        self._prune()
        clock = dict(self._clocks.get(event.queue, {}))
        for each in after:
            for queue, number in getattr(each, "clock", {}).items():
                clock[queue] = max(clock.get(queue, 0), number)
        clock[event.queue] = event.number
        stale = next((each for each in self._retired if _overlap(each, src)), None)
        if stale is not None:
            raise RaceError(f"the copy reads {_show(src)}, of which {_show(stale)} was retired and not filled since")
        for other in self._in_flight:
            collides = _overlap(other.range, dst) or (other.is_write and _overlap(other.range, src))
            if collides and other.event.number > clock.get(other.event.queue, 0):
                raise RaceError(
                    f"a copy from {_show(src)} to {_show(dst)} is issued while {other.what} {_show(other.range)}, and "
                    f"does not wait for it: event {other.event.number} of queue {other.event.queue!r} has not passed, "
                    "and nothing in `after` follows it"
                )
        event.clock = self._clocks[event.queue] = clock
        self._retired = [left for each in self._retired for left in _without(each, dst)]
        self._in_flight += [
            _Access(f"a copy {event.queue} writes", dst, True, event),
            _Access(f"a copy {event.queue} reads", src, False, event),
        ]

    def withdraw(self, event: OrderedEvent) -> None:
        """The copy was not issued after all."""
        self._in_flight = [each for each in self._in_flight if each.event is not event]

    def retired(self, where: Range, *, is_device_memory: bool) -> None:
        """A range may be reused, so nothing may be in flight there. Only device memory can be filled by copies alone,
        so only there a later read without one is a race."""
        self._prune()
        for other in self._in_flight:
            if _overlap(other.range, where):
                raise RaceError(f"{_show(where)} is retired while {other.what} {_show(other.range)}")
        if is_device_memory:
            self._retired = [left for each in self._retired for left in _without(each, where)] + [where]

    def forget(self, where: Range) -> None:
        """The memory is given back; other memory may come to lie there."""
        self._retired = [left for each in self._retired for left in _without(each, where)]

    def _prune(self) -> None:
        self._in_flight = [each for each in self._in_flight if not each.event.query()]


def _overlap(a: Range, b: Range) -> bool:
    return a[0] < b[0] + b[1] and b[0] < a[0] + a[1]


def _without(a: Range, b: Range) -> list[Range]:
    """Return what is left of `a` without `b`."""
    if not _overlap(a, b):
        return [a]
    left, right = (a[0], b[0] - a[0]), (b[0] + b[1], a[0] + a[1] - b[0] - b[1])
    return [each for each in (left, right) if each[1] > 0]


def _show(where: Range) -> str:
    return f"[{where[0]:#x}, +{where[1]} bytes)"
