"""The ring: a byte arena through which streamed chunks pass. Addresses only, no effects."""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from hetero.memory.device import Event


class Space(NamedTuple):
    """`[address, address + nbytes)` of a ring, to be written only after every event in `fences`."""

    address: int
    nbytes: int
    fences: tuple[Event, ...]


class Ring:
    """Next-fit allocation in an address range; first in, first out use never fragments it.

    A space that is not given back in turn (somebody still aliases it) is passed over, it never blocks the others.
    `free` takes the event after which the old contents are no longer read; `allocate` hands on the events that the
    new owner of those bytes must wait for. Not thread-safe: the executor calls it under its lock.
    """

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self._taken: list[tuple[int, int]] = []  # (start, end), sorted
        self._fences: list[tuple[int, int, Event]] = []
        self._cursor = address

    @property
    def used_nbytes(self) -> int:
        return sum(end - start for start, end in self._taken)

    def can_fit(self, nbytes: int) -> bool:
        return self._place_for(nbytes) is not None

    def allocate(self, nbytes: int) -> Space | None:
        """Take `nbytes`, or None when no gap is large enough now."""
        start = self._place_for(nbytes)
        if start is None:
            return None
        end = start + nbytes
        insort(self._taken, (start, end))
        self._cursor = end
        fences = tuple(event for low, high, event in self._fences if low < end and start < high)
        # A fence is kept for the part of its range that is not handed on: another owner may get that part.
        self._fences = [
            (low, high, event)
            for low, high, event in self._fences
            if not (start <= low and high <= end) and not event.query()
        ]
        return Space(start, nbytes, tuple(event for event in fences if not event.query()))

    def free(self, space: Space, fence: Event | None) -> None:
        self._taken.remove((space.address, space.address + space.nbytes))
        if fence is not None and not fence.query():
            self._fences.append((space.address, space.address + space.nbytes, fence))
        if not self._taken:
            self._cursor = self.address

    def _place_for(self, nbytes: int) -> int | None:
        end_of_ring = self.address + self.nbytes
        edges = [self.address, *(edge for taken in self._taken for edge in taken), end_of_ring]
        gaps = list(zip(edges[::2], edges[1::2], strict=True))
        for start, end in gaps:
            first = max(start, self._cursor)
            if end - first >= nbytes:
                return first
        for start, end in gaps:
            if end - start >= nbytes:
                return start
        return None
