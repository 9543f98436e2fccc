"""Choose what is resident: the least disk traffic per pass, then the least gpu-link traffic, within the budgets.

Note [choice]
    The rings have to hold the largest streamed moment (first tier) and the largest chunk on disk (staging), so what
    streams decides how much the rings leave for residents: `best` walks over the ring sizes at which that changes, and
    `at` places for given ring sizes. Few chunks: every choice is tried. Else, without a gpu tier: larger moments are
    made to fit by keeping their largest chunks, and the room is filled exactly (`fill`); with moments of one chunk that
    is the optimum. With a gpu tier, three ways to share the chunks between the tiers are tried and the best is taken:
    gpu first, cpu first, and both as one room that is then split. That is near the optimum, not always at it; the tests
    hold it to one chunk of disk traffic on small cases of moments of one chunk.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from hetero.memory.fill import Item, fill
from hetero.memory.plan_types import Budgets, ChunkSpec, Residents, Trace
from hetero.memory.spread import Place, spread_evenly
from hetero.memory.workload import Traffic, Workload

MAX_TRIED_WITH_GPU = 7  # chunks: 3 ** 7 choices
MAX_TRIED = 10  # chunks: 2 ** 10 choices
MAX_RING_SIZES = 12
MAX_RING_SIZES_WITH_GPU = 6  # for each of the two rings


class Choice(NamedTuple):
    """`first` and `second` are resident; the rings are what the rest needs."""

    traffic: Traffic
    first: frozenset[int]
    second: frozenset[int]
    ring_nbytes: int
    staging_nbytes: int


class _Rate:
    """What a tier saves at most: the value of all chunks, and the best of them per byte."""

    def __init__(self, workload: Workload, values: Mapping[int, int]) -> None:
        nbytes = workload.nbytes
        self._total = sum(values.values())
        best = max(workload.free, key=lambda i: values[i] / nbytes[i], default=None)
        self._value, self._nbytes = (0, 1) if best is None else (values[best], nbytes[best])

    def least(self, room_nbytes: int) -> int:
        """What `room_nbytes` of residents leave over at least."""
        return max(0, self._total - room_nbytes * self._value // self._nbytes)


class Placement:
    """All placements of one workload within one pair of budgets, which must have passed `Workload.check`."""

    def __init__(self, workload: Workload, budgets: Budgets, *, max_tried: int | None = None) -> None:
        self.workload = workload
        self.has_gpu = budgets.gpu_nbytes is not None
        first_nbytes = budgets.cpu_nbytes if budgets.gpu_nbytes is None else budgets.gpu_nbytes
        self._first_nbytes = first_nbytes - workload.pinned_nbytes
        self._second_nbytes = budgets.cpu_nbytes if self.has_gpu else 0
        self._disk_rate = _Rate(workload, workload.disk_value)
        self._link_rate = _Rate(workload, workload.link_value)
        if max_tried is None:
            max_tried = MAX_TRIED_WITH_GPU if self.has_gpu else MAX_TRIED
        self._tried = sorted(self._all_choices(), key=_order) if len(workload.free) <= max_tried else None

    # -- ring sizes ---------------------------------------------------------------------------------------------------

    def best(self) -> Choice:
        """The choice with the least traffic, whatever its rings."""
        if self._tried is not None:
            return next(choice for choice in self._tried if self._fits(choice, 0, 0))
        best: Choice | None = None
        for ring_nbytes, staging_nbytes in self._ring_pairs():
            if best is not None and self.least_traffic(ring_nbytes, staging_nbytes) >= best.traffic:
                continue
            choice = self.at(ring_nbytes, staging_nbytes)
            if choice is not None and (best is None or _order(choice) < _order(best)):
                best = choice
        assert best is not None, "budgets that pass the check leave a choice"
        return best

    def at(self, ring_nbytes: int, staging_nbytes: int) -> Choice | None:
        """The choice with the least traffic that makes do with rings of these sizes and pays for them."""
        if self._tried is None:
            return self._filled(ring_nbytes, staging_nbytes)
        for choice in self._tried:
            is_enough = choice.ring_nbytes <= ring_nbytes and choice.staging_nbytes <= staging_nbytes
            if is_enough and self._fits(choice, ring_nbytes, staging_nbytes):
                return choice
        return None

    def _fits(self, choice: Choice, ring_nbytes: int, staging_nbytes: int) -> bool:
        size_of = self.workload.size_of
        ring_nbytes = max(choice.ring_nbytes, ring_nbytes) if choice.ring_nbytes else 0
        staging_nbytes = max(choice.staging_nbytes, staging_nbytes) if choice.staging_nbytes else 0
        return (
            size_of(choice.first) + ring_nbytes <= self._first_nbytes
            and size_of(choice.second) + staging_nbytes <= self._second_nbytes
        )

    def _ring_pairs(self) -> list[tuple[int, int]]:
        """Ring sizes at which the choice can change, smallest first."""
        workload = self.workload
        limit = MAX_RING_SIZES_WITH_GPU if self.has_gpu else MAX_RING_SIZES
        sizes = _thin({0, *workload.nbytes.values()}, limit)
        rings = {workload.ring_for([i for i in workload.free if workload.nbytes[i] <= size]) for size in sizes}
        rings |= set(workload.need_nbytes)
        pairs = set(product(_thin(rings, limit), sizes if self.has_gpu else [0]))
        if self.has_gpu:
            # Budgets that are just large enough may leave this pair only.
            staging_nbytes, larger = workload.smallest_staging(self._first_nbytes + workload.pinned_nbytes)
            pairs.add((workload.ring_for(frozenset(workload.free) - larger), staging_nbytes))
        return sorted(pairs, key=lambda pair: (sum(pair), pair))

    def least_traffic(self, ring_nbytes: int, staging_nbytes: int) -> Traffic:
        """A bound from below for `at`: all room is filled with what saves the most per byte."""
        first_nbytes = max(0, self._first_nbytes - ring_nbytes)
        second_nbytes = max(0, self._second_nbytes - staging_nbytes)
        disk_nbytes = self._disk_rate.least(first_nbytes + second_nbytes)
        return Traffic(disk_nbytes, self._link_rate.least(first_nbytes) if self.has_gpu else 0)

    # -- few chunks ---------------------------------------------------------------------------------------------------

    def _all_choices(self) -> Iterator[Choice]:
        free = self.workload.free
        for tiers in product((0, 1, 2) if self.has_gpu else (0, 2), repeat=len(free)):
            first = frozenset(i for i, tier in zip(free, tiers, strict=True) if tier == 0)
            second = frozenset(i for i, tier in zip(free, tiers, strict=True) if tier == 1)
            if self._is_room(first, second):
                yield self._choice(first, second)

    def _is_room(self, first: Iterable[int], second: Iterable[int]) -> bool:
        size_of = self.workload.size_of
        return size_of(first) <= self._first_nbytes and size_of(second) <= self._second_nbytes

    def _choice(self, first: frozenset[int], second: frozenset[int]) -> Choice:
        streamed = frozenset(self.workload.free) - first
        on_disk = streamed - second
        return Choice(
            self.workload.traffic_of(streamed, on_disk, has_gpu=self.has_gpu),
            first,
            second,
            self.workload.ring_for(streamed),
            max((self.workload.nbytes[i] for i in on_disk), default=0) if self.has_gpu else 0,
        )

    # -- many chunks --------------------------------------------------------------------------------------------------

    def _filled(self, ring_nbytes: int, staging_nbytes: int) -> Choice | None:
        kept = self._kept_for_ring(ring_nbytes)
        room_nbytes = self._first_nbytes - ring_nbytes - self.workload.size_of(kept)
        if room_nbytes < 0:
            return None
        rest = [i for i in self.workload.free if i not in kept]
        if not self.has_gpu:
            return self._choice(kept | self._fill(rest, room_nbytes), frozenset())
        second_room_nbytes = self._second_nbytes - staging_nbytes
        if second_room_nbytes < 0:
            return None
        least = self.least_traffic(ring_nbytes, staging_nbytes)
        best: Choice | None = None
        for first, second in self._shares(rest, room_nbytes, second_room_nbytes, staging_nbytes):
            choice = self._choice(kept | first, frozenset(second))
            if best is None or _order(choice) < _order(best):
                best = choice
            if choice.traffic <= least:
                break
        return best

    def _kept_for_ring(self, ring_nbytes: int) -> frozenset[int]:
        """What the first tier must keep so that every moment passes through a ring of this size, largest first."""
        kept: set[int] = set()
        for need, need_nbytes in zip(self.workload.needs, self.workload.need_nbytes, strict=True):
            if need_nbytes <= ring_nbytes:
                continue
            streamed = sorted((i for i in need if i not in kept), key=lambda i: (-self.workload.nbytes[i], i))
            nbytes = self.workload.size_of(streamed)
            for i in streamed:
                if nbytes <= ring_nbytes:
                    break
                kept.add(i)
                nbytes -= self.workload.nbytes[i]
        return frozenset(kept)

    def _shares(
        self, rest: list[int], first_nbytes: int, second_nbytes: int, staging_nbytes: int
    ) -> Iterator[tuple[set[int], set[int]]]:
        """Ways to share `rest` between the tiers. What is too large to be staged must go to one of them."""
        size_of = self.workload.size_of
        large = [i for i in rest if self.workload.nbytes[i] > staging_nbytes]
        small = [i for i in rest if self.workload.nbytes[i] <= staging_nbytes]

        first = self._fill(rest, first_nbytes)
        second = set(large) - first
        if size_of(second) <= second_nbytes:
            room_nbytes = second_nbytes - size_of(second)
            second |= self._fill([i for i in small if i not in first], room_nbytes)
            yield first, second
            yield from self._resplit(first | second, first_nbytes, second_nbytes)

        second = self._fill(large, second_nbytes)
        first = set(large) - second
        if size_of(first) <= first_nbytes:
            second |= self._fill(small, second_nbytes - size_of(second))
            left = [i for i in small if i not in second]
            first |= self._fill(left, first_nbytes - size_of(first))
            yield first, second
            yield from self._resplit(first | second, first_nbytes, second_nbytes)

        room_nbytes = first_nbytes + second_nbytes - size_of(large)
        if room_nbytes >= 0:
            yield from self._resplit(set(large) | self._fill(small, room_nbytes), first_nbytes, second_nbytes)

    def _resplit(
        self, resident: set[int], first_nbytes: int, second_nbytes: int
    ) -> Iterator[tuple[set[int], set[int]]]:
        """Share `resident` so that the gpu tier holds as much as it can, if all of it finds a place."""
        ordered = [i for i in self.workload.free if i in resident]
        first = self._fill(ordered, first_nbytes, link=True)
        if self.workload.size_of(resident - first) <= second_nbytes:
            yield first, resident - first

    def _fill(self, chunk_ids: Iterable[int], room_nbytes: int, *, link: bool = False) -> set[int]:
        nbytes, value = self.workload.nbytes, self.workload.link_value if link else self.workload.disk_value
        return fill([Item(i, nbytes[i], value[i]) for i in chunk_ids], room_nbytes)

    # -- where in the pass --------------------------------------------------------------------------------------------

    def residents(self, choice: Choice, ring_nbytes: int = 0, staging_nbytes: int = 0) -> Residents:
        """Spread the choice over the pass, give the rings these sizes or what they need, and add lookup tables."""
        workload = self.workload
        ring_nbytes = max(ring_nbytes, choice.ring_nbytes) if choice.ring_nbytes else 0
        staging_nbytes = max(staging_nbytes, choice.staging_nbytes) if choice.staging_nbytes else 0
        # Chunks of a moment that is larger than the ring cannot change places with others.
        needs = zip(workload.needs, workload.need_nbytes, strict=True)
        fixed = {i for need, need_nbytes in needs if need_nbytes > ring_nbytes for i in need}
        streamed = self._spread(workload.free, frozenset(workload.free) - choice.first, fixed)
        on_disk = streamed
        if choice.second:
            # The second tier's chunks keep their number of each kind, but among what streams now.
            on_disk = self._spread_on_disk(streamed, choice)
        first, second = frozenset(workload.free) - streamed, streamed - on_disk
        if not self.has_gpu:
            second = frozenset()
        if self._choice(first, second).traffic > choice.traffic:  # chunks that return in a pass are not quite alike
            first, second = choice.first, choice.second
        room_nbytes = self._first_nbytes - workload.size_of(first) - ring_nbytes
        second_room_nbytes = self._second_nbytes - workload.size_of(second) - staging_nbytes
        first_tables, second_tables = self._tables(room_nbytes, second_room_nbytes)
        first |= workload.pinned | first_tables
        second |= second_tables
        if self.has_gpu:
            return Residents(first, second, ring_nbytes, staging_nbytes)
        return Residents(frozenset(), first, 0, ring_nbytes)

    def _kind(self, chunk_id: int) -> Hashable:
        spec = self.workload.specs[chunk_id]
        return spec.nbytes, spec.read_nbytes, self.workload.num_stays[chunk_id]

    def _spread(self, among: Iterable[int], chosen: frozenset[int], fixed: set[int]) -> frozenset[int]:
        starts_s = [0.0]
        for moment in self.workload.trace.moments:
            starts_s.append(starts_s[-1] + moment.compute_s)
        if starts_s[-1] <= 0:  # no times recorded: moments count alike
            starts_s = [float(position) for position in range(len(starts_s))]
        places = []
        num_of_kind: dict[Hashable, int] = {}
        for i in among:
            kind: Hashable = ("fixed", i) if i in fixed else self._kind(i)
            places.append(Place(i, self.workload.nbytes[i], starts_s[self.workload.first_use[i]] / starts_s[-1], kind))
            num_of_kind[kind] = num_of_kind.get(kind, 0) + (i in chosen)
        return frozenset(spread_evenly(places, num_of_kind))

    def _spread_on_disk(self, streamed: frozenset[int], choice: Choice) -> frozenset[int]:
        ordered = [i for i in self.workload.free if i in streamed]
        num_second: dict[Hashable, int] = {}
        for i in choice.second:
            num_second[self._kind(i)] = num_second.get(self._kind(i), 0) + 1
        on_disk = set(ordered)
        for i in ordered:
            if num_second.get(self._kind(i), 0) > 0:
                num_second[self._kind(i)] -= 1
                on_disk.discard(i)
        return self._spread(ordered, frozenset(on_disk), set())

    def _tables(self, room_nbytes: int, second_room_nbytes: int) -> tuple[frozenset[int], frozenset[int]]:
        """Lookup tables become resident last: they cost a pass only a few rows."""
        first: set[int] = set()
        second: set[int] = set()
        for i in sorted(self.workload.tables, key=lambda i: -self.workload.specs[i].row_read_nbytes):
            nbytes = self.workload.specs[i].nbytes
            if nbytes <= room_nbytes:
                first.add(i)
                room_nbytes -= nbytes
            elif self.has_gpu and nbytes <= second_room_nbytes:
                second.add(i)
                second_room_nbytes -= nbytes
        return frozenset(first), frozenset(second)


def make_residents(chunks: Sequence[ChunkSpec], trace: Trace, budgets: Budgets) -> Residents:
    """Place with the least traffic per pass, Note [choice]. Raises BudgetError."""
    workload = Workload(chunks, trace)
    workload.check(budgets)
    placement = Placement(workload, budgets)
    return placement.residents(placement.best())


def _order(choice: Choice) -> tuple[Traffic, int]:
    return choice.traffic, choice.ring_nbytes + choice.staging_nbytes


def _thin(values: Iterable[int], limit: int) -> list[int]:
    """At most `limit` of the values, the smallest and the largest among them."""
    ordered = sorted(set(values))
    if len(ordered) <= limit:
        return ordered
    step = (len(ordered) - 1) / (limit - 1)
    return [ordered[round(position * step)] for position in range(limit)]
