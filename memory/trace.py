"""What passes of the model do: which chunks in which order, and how long it computes between its requests."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from hetero.memory.plan_types import Moment, Trace

NUM_PASSES_RECORDED = 3


class Recorder:
    """Records the first passes of each phase. A pass that is recorded costs two clock readings per moment.

    A moment computes from the grant of its lease to the next request (or the end of the pass), so waiting for chunks is
    not in it. `settle` is called at both ends where compute is asynchronous; it must block until the compute is done.
    """

    def __init__(self, settle: Callable[[], None] | None = None) -> None:
        self._settle = settle
        self._passes: dict[str, list[list[tuple[str, tuple[int, ...], float, float]]]] = {}
        self._current: list[tuple[str, tuple[int, ...], float, float]] | None = None
        self._phase = ""
        self._open: tuple[str, tuple[int, ...], float] | None = None

    def begin(self, phase: str) -> None:
        self._phase = phase
        passes = self._passes.setdefault(phase, [])
        self._current = [] if len(passes) < NUM_PASSES_RECORDED else None
        self._open = None

    def request(self) -> None:
        """The model asks for the next chunks: the open moment's compute ends."""
        if self._current is None or self._open is None:
            return
        name, chunk_ids, start_s = self._open
        self._current.append((name, chunk_ids, start_s, self._now()))
        self._open = None

    def grant(self, name: str, chunk_ids: tuple[int, ...]) -> None:
        """The chunks are there: the moment's compute begins."""
        if self._current is not None:
            self._open = (name, chunk_ids, self._now())

    def end(self) -> bool:
        """End the pass; True when it was recorded."""
        if self._current is None:
            return False
        self.request()
        self._passes[self._phase].append(self._current)
        self._current = None
        return True

    def abort(self) -> None:
        """The pass raised: forget it."""
        self._current = self._open = None

    def trace(self, phase: str) -> Trace | None:
        """The last recorded pass's order with, per moment, the least compute time over recorded passes like it."""
        passes = self._passes.get(phase)
        if not passes:
            return None
        last = passes[-1]
        alike = [p for p in passes if [m[:2] for m in p] == [m[:2] for m in last]]
        moments = (
            Moment(name, chunk_ids, min(p[i][3] - p[i][2] for p in alike))
            for i, (name, chunk_ids, _, _) in enumerate(last)
        )
        return Trace(phase, tuple(moments))

    def _now(self) -> float:
        if self._settle is not None:
            self._settle()
        return perf_counter()
