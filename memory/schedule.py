"""The order in which streamed chunks pass through the ring, repeated for ever."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Run:
    """A chunk and how many moments in a row use it before it may leave."""

    chunk_id: int
    num_uses: int


class Schedule:
    """Runs of one pass; index i is pass `i // len`, position `i % len`."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self._runs = tuple(runs)
        self._positions: dict[int, list[int]] = {}
        for position, run in enumerate(self._runs):
            self._positions.setdefault(run.chunk_id, []).append(position)

    def __len__(self) -> int:
        return len(self._runs)

    def __getitem__(self, index: int) -> Run:
        return self._runs[index % len(self._runs)]

    def is_same(self, runs: Sequence[Run]) -> bool:
        return self._runs == tuple(runs)

    def distance(self, chunk_id: int, index: int) -> int | None:
        """How many runs lie between `index` and the next run of `chunk_id` (0: it is next), or None."""
        positions = self._positions.get(chunk_id)
        if not positions:
            return None
        return min((position - index) % len(self._runs) for position in positions)

    def first_index_after(self, index: int) -> int:
        """The smallest index above `index` that starts a pass."""
        return index + 1 if not self._runs else -(-(index + 1) // len(self._runs)) * len(self._runs)


def runs_of(moments: Iterable[Sequence[int]], streamed: Collection[int]) -> list[Run]:
    """Turn the chunk ids that each moment of a pass uses into runs of streamed chunks."""
    runs: list[list[int]] = []
    previous: dict[int, list[int]] = {}
    for chunk_ids in moments:
        current: dict[int, list[int]] = {}
        for chunk_id in chunk_ids:
            if chunk_id not in streamed or chunk_id in current:
                continue
            run = previous.get(chunk_id)
            if run is None:
                run = [chunk_id, 0]
                runs.append(run)
            run[1] += 1
            current[chunk_id] = run
        if current:
            previous = current
    return [Run(chunk_id, num_uses) for chunk_id, num_uses in runs]
