"""Chunks and a trace as the placement sees them: what can stream, what a moment needs, what a choice costs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from hetero.io.errors import ConfigError
from hetero.memory.plan_types import BudgetError, Budgets, ChunkSpec, Trace, uses_of


class Traffic(NamedTuple):
    """Bytes per pass of streamed chunks, rows of lookup tables not included. Ordered: disk first."""

    disk_nbytes: int
    gpu_link_nbytes: int


class Workload:
    """`free` are the chunks that the trace uses and that may or may not be resident, in order of first use."""

    def __init__(self, chunks: Sequence[ChunkSpec], trace: Trace) -> None:
        self.chunks = tuple(chunks)
        self.trace = trace
        self.specs = {chunk.chunk_id: chunk for chunk in chunks}
        if len(self.specs) != len(self.chunks):
            raise ConfigError("two chunks have the same id")
        first_use: dict[int, int] = {}
        for position, moment in enumerate(trace.moments):
            for chunk_id in moment.chunk_ids:
                if chunk_id not in self.specs:
                    raise ConfigError(f"moment {moment.name!r} uses chunk {chunk_id}, which is not among the chunks")
                first_use.setdefault(chunk_id, position)
        self.first_use = first_use
        self.pinned = frozenset(c.chunk_id for c in chunks if c.pinned)
        self.tables = tuple(i for i in first_use if self.specs[i].by_rows and i not in self.pinned)
        self.free = tuple(i for i in first_use if not self.specs[i].by_rows and i not in self.pinned)
        self.nbytes = {i: self.specs[i].nbytes for i in self.free}
        self.pinned_nbytes = sum(self.specs[i].nbytes for i in self.pinned)
        free = frozenset(self.free)
        self._moments = [tuple(i for i in moment.chunk_ids if i in free) for moment in trace.moments]
        self.needs = tuple(dict.fromkeys(frozenset(ids) for ids in self._moments if ids))
        self._shared_needs = tuple(need for need in self.needs if len(need) > 1)
        self.need_nbytes = tuple(self.size_of(need) for need in self.needs)
        self.num_stays = {i: 0 for i in self.free}
        for use in uses_of(self._moments, free, trace.starts):
            self.num_stays[use.chunk_id] += 1
        self.disk_value = {i: self.specs[i].read_nbytes * num for i, num in self.num_stays.items()}
        self.link_value = {i: self.nbytes[i] * num for i, num in self.num_stays.items()}
        self._is_simple = all(num == 1 for num in self.num_stays.values())

    def size_of(self, chunk_ids: Iterable[int]) -> int:
        return sum(self.nbytes[i] for i in chunk_ids)

    def ring_for(self, streamed: Collection[int]) -> int:
        """The smallest first-tier ring: the largest moment of streamed chunks."""
        largest = max((self.nbytes[i] for i in streamed), default=0)
        return max([largest, *(sum(self.nbytes[i] for i in need if i in streamed) for need in self._shared_needs)])

    def traffic_of(self, streamed: frozenset[int], on_disk: frozenset[int], *, has_gpu: bool) -> Traffic:
        if self._is_simple:  # then nobody's residency changes how often another chunk comes
            disk_nbytes = sum(self.specs[i].read_nbytes for i in on_disk)
            return Traffic(disk_nbytes, self.size_of(streamed) if has_gpu else 0)
        uses = uses_of(self._moments, streamed, self.trace.starts)
        disk_nbytes = sum(self.specs[use.chunk_id].read_nbytes for use in uses if use.chunk_id in on_disk)
        return Traffic(disk_nbytes, sum(self.nbytes[use.chunk_id] for use in uses) if has_gpu else 0)

    # A resident chunk takes its size and lowers the largest moment by no more, so the smallest first tier streams all.

    def smallest_first_nbytes(self) -> int:
        return self.pinned_nbytes + self.ring_for(self.free)

    def smallest_staging(self, gpu_nbytes: int) -> tuple[int, frozenset[int]]:
        """The smallest cpu tier below a gpu tier of `gpu_nbytes`, and what must then be resident on the gpu.

        A chunk resident on the cpu takes no less than staging it, so the cpu tier needs the largest chunk that the gpu
        tier cannot keep: the smallest size such that all larger ones fit the gpu beside the ring for the others.
        """
        room_nbytes = gpu_nbytes - self.pinned_nbytes

        def larger_than(size: int) -> frozenset[int]:
            return frozenset(i for i in self.free if self.nbytes[i] > size)

        def fits(size: int) -> bool:  # the larger the size, the easier
            larger = larger_than(size)
            return self.size_of(larger) + self.ring_for(frozenset(self.free) - larger) <= room_nbytes

        sizes = sorted({0, *self.nbytes.values()})
        smallest = sizes[min(bisect_left(sizes, True, key=fits), len(sizes) - 1)]
        return smallest, larger_than(smallest)

    def check(self, budgets: Budgets) -> None:
        """Raise BudgetError, which carries the smallest that works, when a tier is too small."""
        first_nbytes = self.smallest_first_nbytes()
        if budgets.gpu_nbytes is None:
            if budgets.cpu_nbytes < first_nbytes:
                raise BudgetError("cpu", first_nbytes, budgets.cpu_nbytes, self.trace.phase)
            return
        if budgets.gpu_nbytes < first_nbytes:
            raise BudgetError("gpu", first_nbytes, budgets.gpu_nbytes, self.trace.phase)
        staging_nbytes, _ = self.smallest_staging(budgets.gpu_nbytes)
        if budgets.cpu_nbytes < staging_nbytes:
            raise BudgetError("cpu", staging_nbytes, budgets.cpu_nbytes, self.trace.phase)
