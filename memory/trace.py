"""What passes of the model do: which chunks in which order, and how long it computes between its requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

from hetero.memory.plan_types import Moment, Trace

NUM_PASSES_KEPT = 3


class _Moment(NamedTuple):
    """What a module asked for, what those around it hold meanwhile, and from when to when it computed."""

    name: str
    chunk_ids: tuple[int, ...]
    around: tuple[int, ...]
    start_s: float
    end_s: float

    @property
    def request(self) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        return self.name, self.chunk_ids, self.around


_Pass = list[_Moment]


class Recorder:
    """Records every pass, and keeps the last three of each phase. It costs two clock readings per moment.

    A moment computes from the grant of its lease to the next request (or the end of the pass), so waiting for chunks is
    not in it. `settle` is called at both ends where compute is asynchronous, in the first three passes of a phase only,
    because it blocks until the compute is done; the clocks of later passes are not used then.
    """

    def __init__(self, settle: Callable[[], None] | None = None) -> None:
        self._settle = settle
        self._passes: dict[str, deque[_Pass]] = {}
        self._num_passes: dict[str, int] = {}
        self._orders: dict[str, list[tuple[int, ...]]] = {}
        self._current: _Pass | None = None
        self._phase = ""
        self._open: _Moment | None = None

    def begin(self, phase: str) -> None:
        self._phase = phase
        self._current = []
        self._open = None

    def request(self) -> None:
        """The model asks for the next chunks: the open moment's compute ends."""
        if self._current is None or self._open is None:
            return
        self._current.append(self._open._replace(end_s=self._now()))
        self._open = None

    def grant(self, name: str, chunk_ids: tuple[int, ...], around: tuple[int, ...] = ()) -> None:
        """The chunks are there: the moment's compute begins. `around` are those that have to be there all along."""
        if self._current is not None:
            now_s = self._now()
            self._open = _Moment(name, chunk_ids, around, now_s, now_s)

    def end(self) -> bool:
        """End the pass; True when it used chunks in another order than the phase's last pass, or is its first."""
        if self._current is None:
            return False
        self.request()
        count = self._num_passes[self._phase] = self.num_passes(self._phase) + 1
        if self._settle is None or count <= NUM_PASSES_KEPT:
            self._passes.setdefault(self._phase, deque(maxlen=NUM_PASSES_KEPT)).append(self._current)
        order = [moment.chunk_ids for moment in self._current]
        is_new = order != self._orders.get(self._phase)
        self._orders[self._phase] = order
        self._current = None
        return is_new

    def abort(self) -> None:
        """The pass raised: forget it."""
        self._current = self._open = None

    def num_passes(self, phase: str) -> int:
        return self._num_passes.get(phase, 0)

    def order(self, phase: str) -> list[tuple[int, ...]]:
        """The chunks of each moment of the phase's last pass."""
        return self._orders[phase]

    def trace(self, phase: str) -> Trace | None:
        """The last kept pass's order with, per moment, the least compute time over kept passes like it."""
        passes = self._passes.get(phase)
        if not passes:
            return None
        last = passes[-1]
        alike = [p for p in passes if [m.request for m in p] == [m.request for m in last]]
        moments = (
            Moment(m.name, tuple(dict.fromkeys(m.chunk_ids + m.around)), min(p[i].end_s - p[i].start_s for p in alike))
            for i, m in enumerate(last)
        )
        return Trace(phase, tuple(moments))

    def _now(self) -> float:
        if self._settle is not None and self.num_passes(self._phase) < NUM_PASSES_KEPT:
            self._settle()
        return perf_counter()
