"""The order in which streamed chunks pass through the ring, repeated for ever."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from hetero.memory.plan_types import uses_of


@dataclass(frozen=True, slots=True)
class Stay:
    """A chunk and how many moments in a row use it before it may leave."""

    chunk_id: int
    num_uses: int


class Schedule:
    """Stays of one pass; index i is pass `i // len`, position `i % len`."""

    def __init__(self, stays: Iterable[Stay]) -> None:
        self._stays = tuple(stays)
        self._positions: dict[int, list[int]] = {}
        for position, stay in enumerate(self._stays):
            self._positions.setdefault(stay.chunk_id, []).append(position)

    def __len__(self) -> int:
        return len(self._stays)

    def __getitem__(self, index: int) -> Stay:
        return self._stays[index % len(self._stays)]

    def is_same(self, stays: Sequence[Stay]) -> bool:
        return self._stays == tuple(stays)

    def distance(self, chunk_id: int, index: int) -> int | None:
        """How many stays lie between `index` and the next stay of `chunk_id` (0: it is next), or None."""
        positions = self._positions.get(chunk_id)
        if not positions:
            return None
        return min((position - index) % len(self._stays) for position in positions)

    def first_index_after(self, index: int) -> int:
        """The smallest index above `index` that starts a pass."""
        return index + 1 if not self._stays else -(-(index + 1) // len(self._stays)) * len(self._stays)


def stays_of(moments: Iterable[Sequence[int]], streamed: Collection[int]) -> list[Stay]:
    """Turn the chunk ids that each moment of a pass uses into stays of streamed chunks."""
    return [Stay(use.chunk_id, use.num_moments) for use in uses_of(moments, frozenset(streamed))]
