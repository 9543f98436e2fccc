"""Event simulation of a plan: how long a steady pass takes, what crosses each link, who waits for whom.

Note [rules]
    These are the executor's rules, so that a prediction can be held against a measurement.
    1. Compute takes the moments in order, for ever. A moment starts when all its chunks are in the first tier.
    2. Streamed chunks get space in the first tier's ring in schedule order, as soon as there is a gap: next fit, and
       from the start again when the ring is empty. A chunk gets none while an earlier stay of it lasts. Space is free
       at the end of the stay's last moment.
    3. Without a gpu tier a chunk is read from disk straight into that space. With one, a chunk that the cpu tier does
       not hold is first read into the staging ring, takes gpu space when the read is done, and leaves the staging ring
       when the copy is done.
    4. Each link is serial and first in, first out. The disk's latency counts only when the link was idle (queue depth
       hides it otherwise), the gpu link's on every copy.
    5. The rows of a lookup table are read when its moment is reached, ahead of what is queued: the moment waits for
       latency and transfer, and the next chunk's read is longer by the transfer.
    6. At a start of the trace nothing is under way: no transfer for a moment after it begins before it.
    All start times are maxima over earlier ones, in schedule order, so one walk gives the events without a heap.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hetero.memory.plan_types import ChunkSpec, Links, Plan, Trace, Use, row_reads_of, streamed_chunks, uses_of


class Span(NamedTuple):
    """A bar of a timeline. `lane` is "disk", "gpu link" or "compute"; times are seconds from the first pass's start."""

    lane: str
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """A steady pass. `stall_s`: how long each lane stands still in a pass; for compute that is waiting for chunks.

    `peak_ring_nbytes` is per tier the most that was taken of its ring. `num_refetches` counts chunks fetched twice, in
    all steady passes, because the gaps of a tight ring were too small for a moment of several chunks; only then are the
    bytes more than those of what is streamed. `spans` are those of all simulated passes.
    """

    pass_s: float
    first_pass_s: float
    disk_nbytes: int
    gpu_link_nbytes: int
    stall_s: dict[str, float]
    peak_ring_nbytes: dict[str, int]
    num_refetches: int
    spans: tuple[Span, ...]


class RingModel:
    """The placing rules of the executor's ring, with the times at which spaces become free."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.used_nbytes = 0
        self.peak_nbytes = 0
        self.last_s = 0.0  # when the latest space was taken: space is given in order
        self._taken: list[tuple[int, int]] = []
        self._cursor = 0
        self._to_free: deque[tuple[float, list[tuple[int, int]]]] = deque()

    def take(self, nbytes: int, not_before_s: float) -> tuple[tuple[int, int], float] | None:
        """The space and the time it is had, or None when all frees known so far leave no gap."""
        now_s = max(self.last_s, not_before_s)
        to_free = self._to_free
        while True:
            while to_free and to_free[0][0] <= now_s:
                self._free(to_free.popleft()[1])
            start = self._place_for(nbytes)
            if start >= 0:
                break
            if not to_free:
                return None
            now_s = to_free[0][0]
        space = (start, start + nbytes)
        insort(self._taken, space)
        self._cursor = start + nbytes
        self.used_nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.used_nbytes)
        self.last_s = now_s
        return space, now_s

    def free_at(self, at_s: float, spaces: list[tuple[int, int]]) -> None:
        """Free `spaces` together at a time that is not before any given earlier."""
        self._to_free.append((at_s, spaces))

    def empty(self) -> None:
        for _, spaces in self._to_free:
            self._free(spaces)
        self._to_free.clear()
        self._free(list(self._taken))

    def _free(self, spaces: list[tuple[int, int]]) -> None:
        for space in spaces:
            self._taken.remove(space)
            self.used_nbytes -= space[1] - space[0]
        if not self._taken:
            self._cursor = 0

    def _place_for(self, nbytes: int) -> int:
        """The start of the gap to take: the first at or after the cursor, else the first; -1 when there is none."""
        taken, cursor = self._taken, self._cursor
        position = bisect_right(taken, (cursor, -1))
        low = cursor
        if position and taken[position - 1][1] > low:
            low = taken[position - 1][1]
        for start, end in taken[position:]:
            if start - low >= nbytes:
                return low
            low = end
        if self.nbytes - low >= nbytes:
            return low
        low = 0
        for start, end in taken:
            if start - low >= nbytes:
                return low
            low = end
        return low if self.nbytes - low >= nbytes else -1


class _Links:
    """The two serial links and what was counted on them."""

    def __init__(self, links: Links) -> None:
        self.disk_free_s = -1.0
        self.gpu_free_s = -1.0
        self.rows_s = 0.0
        self.disk_nbytes = 0
        self.gpu_nbytes = 0
        self.disk_busy_s = 0.0
        self.gpu_busy_s = 0.0
        self._s_per_disk_byte = 1.0 / links.disk_bytes_per_s
        self._s_per_gpu_byte = 1.0 / links.gpu_bytes_per_s if links.gpu_bytes_per_s else 0.0
        self._disk_latency_s = links.disk_latency_s
        self._gpu_latency_s = links.gpu_latency_s

    def read(self, nbytes: int, not_before_s: float) -> tuple[float, float]:
        start = max(self.disk_free_s, not_before_s)
        duration = nbytes * self._s_per_disk_byte + self.rows_s
        self.rows_s = 0.0
        if start > self.disk_free_s:
            duration += self._disk_latency_s
        self.disk_free_s = start + duration
        self.disk_busy_s += duration
        self.disk_nbytes += nbytes
        return start, self.disk_free_s

    def read_rows(self, nbytes: int) -> float:
        """Seconds that the moment waits."""
        self.rows_s += nbytes * self._s_per_disk_byte
        self.disk_nbytes += nbytes
        return nbytes * self._s_per_disk_byte + self._disk_latency_s

    def copy(self, nbytes: int, not_before_s: float) -> tuple[float, float]:
        start = max(self.gpu_free_s, not_before_s)
        duration = nbytes * self._s_per_gpu_byte + self._gpu_latency_s
        self.gpu_free_s = start + duration
        self.gpu_busy_s += duration
        self.gpu_nbytes += nbytes
        return start, self.gpu_free_s


class _Run:
    """One simulation under way."""

    def __init__(self, plan: Plan, chunks: Sequence[ChunkSpec], trace: Trace, links: Links, has_spans: bool) -> None:
        self.has_gpu = links.gpu_bytes_per_s is not None
        first = plan.gpu_resident if self.has_gpu else plan.cpu_resident
        streamed = streamed_chunks(chunks, trace, first)
        self.specs = {c.chunk_id: c for c in chunks if c.chunk_id in streamed}
        self.host = plan.cpu_resident if self.has_gpu else frozenset[int]()
        self.trace = trace
        uses = uses_of((moment.chunk_ids for moment in trace.moments), streamed, trace.starts)
        assert tuple(use.chunk_id for use in uses) == plan.schedule, "the schedule is not what residents leave over"
        self.starting: list[list[Use]] = [[] for _ in trace.moments]
        for use in uses:
            self.starting[use.first_moment].append(use)
        self.rows = row_reads_of(chunks, trace, plan.gpu_resident | plan.cpu_resident)
        self.ring = RingModel(plan.gpu_ring_nbytes if self.has_gpu else plan.cpu_ring_nbytes)
        self.staging = RingModel(plan.cpu_ring_nbytes if self.has_gpu else 0)
        self.links = _Links(links)
        self.spans: list[Span] | None = [] if has_spans else None
        self.now_s = 0.0  # the end of the last moment computed
        self.start_s = 0.0  # nothing is fetched before
        self.compute_busy_s = 0.0
        self.num_refetches = 0
        self.stays: dict[int, tuple[Use, tuple[int, int]]] = {}  # open stays by chunk, in order
        self.stay_end_s: dict[int, float] = {}
        # When the last `len(schedule)` uses got their space: staging runs at most one pass ahead of the ring.
        self.taken_s: deque[float] = deque([0.0] * len(uses), maxlen=max(1, len(uses)))

    def run_pass(self) -> float:
        """The end of the pass."""
        for position, moment in enumerate(self.trace.moments):
            ready_s = self.now_s
            if position in self.trace.starts:
                self.start_s = self.now_s
            if position in self.rows:
                ready_s += self.links.read_rows(self.rows[position])
                self._span("disk", f"{moment.name} rows", self.now_s, ready_s)
            for use in self.starting[position]:
                ready_s = max(ready_s, self._fetch(use))
            self.now_s = ready_s + moment.compute_s
            self.compute_busy_s += moment.compute_s
            self._span("compute", moment.name, ready_s, self.now_s)
            if self.stays:
                self._end_stays(position)
        return self.now_s

    def _end_stays(self, position: int) -> None:
        ended = [chunk_id for chunk_id, (use, _) in self.stays.items() if use.last_moment == position]
        if ended:
            self.ring.free_at(self.now_s, [self.stays.pop(chunk_id)[1] for chunk_id in ended])
            for chunk_id in ended:
                self.stay_end_s[chunk_id] = self.now_s

    def _fetch(self, use: Use) -> float:
        """Bring a chunk into the ring; returns when it is there."""
        spec = self.specs[use.chunk_id]
        not_before_s = max(self.start_s, self.stay_end_s.get(use.chunk_id, 0.0))
        staged: tuple[int, int] | None = None
        if self.has_gpu and use.chunk_id not in self.host:
            taken = self.staging.take(spec.nbytes, max(self.start_s, self.taken_s[0]))
            assert taken is not None, "the staging ring is smaller than a chunk that passes through it"
            staged = taken[0]
            not_before_s = max(not_before_s, self._read(spec, taken[1]))
        taken = self.ring.take(spec.nbytes, not_before_s)
        if taken is None:
            taken = self._start_over(spec)
        space, taken_s = taken
        self.taken_s.append(taken_s)
        self.stays[use.chunk_id] = (use, space)
        if not self.has_gpu:
            return self._read(spec, taken_s)
        end_s = self._copy(spec, taken_s)
        if staged is not None:
            self.staging.free_at(end_s, [staged])
        return end_s

    def _start_over(self, spec: ChunkSpec) -> tuple[tuple[int, int], float]:
        """Nothing but this moment's chunks is left in the ring and the gaps are too small: fetch those again."""
        self.ring.empty()
        for chunk_id, (use, _) in list(self.stays.items()):
            other = self.specs[chunk_id]
            taken = self.ring.take(other.nbytes, self.now_s)
            assert taken is not None, "the ring is smaller than a moment's chunks"
            self.stays[chunk_id] = (use, taken[0])
            end_s = self.now_s
            if chunk_id not in self.host:
                end_s = self._read(other, end_s)
            if self.has_gpu:
                self._copy(other, end_s)
            self.num_refetches += 1
        taken = self.ring.take(spec.nbytes, self.now_s)
        assert taken is not None, "the ring is smaller than a moment's chunks"
        return taken

    def _read(self, spec: ChunkSpec, not_before_s: float) -> float:
        start_s, end_s = self.links.read(spec.read_nbytes, not_before_s)
        self._span("disk", f"chunk {spec.chunk_id}", start_s, end_s)
        return end_s

    def _copy(self, spec: ChunkSpec, not_before_s: float) -> float:
        start_s, end_s = self.links.copy(spec.nbytes, not_before_s)
        self._span("gpu link", f"chunk {spec.chunk_id}", start_s, end_s)
        return end_s

    def _span(self, lane: str, name: str, start_s: float, end_s: float) -> None:
        if self.spans is not None:
            self.spans.append(Span(lane, name, start_s, end_s))


def simulate(
    plan: Plan,
    chunks: Sequence[ChunkSpec],
    trace: Trace,
    links: Links,
    *,
    num_passes: int = 3,
    with_spans: bool = True,
) -> Simulation:
    """Walk `num_passes` passes of `plan` from empty rings, see Note [rules]; all but the first are the steady state.

    Whether there is a gpu tier is told by `links.gpu_bytes_per_s`. Deterministic.
    """
    assert num_passes >= 2, "a steady pass is the difference between the ends of two passes"
    run = _Run(plan, chunks, trace, links, with_spans)
    first_s = run.run_pass()
    before = (run.links.disk_busy_s, run.links.gpu_busy_s, run.links.disk_nbytes, run.links.gpu_nbytes)
    num_refetches = run.num_refetches
    for _ in range(num_passes - 1):
        run.run_pass()
    num_steady = num_passes - 1
    disk_nbytes = (run.links.disk_nbytes - before[2]) // num_steady
    gpu_link_nbytes = (run.links.gpu_nbytes - before[3]) // num_steady
    compute_s = run.compute_busy_s / num_passes
    # Read-ahead that differs between the ends of two passes must not look like a link faster than it is.
    disk_s = disk_nbytes / links.disk_bytes_per_s
    gpu_s = gpu_link_nbytes / links.gpu_bytes_per_s if links.gpu_bytes_per_s else 0.0
    pass_s = max((run.now_s - first_s) / num_steady, disk_s, gpu_s, compute_s)
    stall_s = {
        "disk": max(0.0, pass_s - (run.links.disk_busy_s - before[0]) / num_steady),
        "gpu link": max(0.0, pass_s - (run.links.gpu_busy_s - before[1]) / num_steady),
        "compute": max(0.0, pass_s - compute_s),
    }
    peaks = {"gpu": run.ring.peak_nbytes, "cpu": run.staging.peak_nbytes}
    if not run.has_gpu:
        peaks = {"gpu": 0, "cpu": run.ring.peak_nbytes}
    return Simulation(
        pass_s=pass_s,
        first_pass_s=first_s,
        disk_nbytes=disk_nbytes,
        gpu_link_nbytes=gpu_link_nbytes,
        stall_s=stall_s,
        peak_ring_nbytes=peaks,
        num_refetches=run.num_refetches - num_refetches,
        spans=tuple(run.spans or ()),
    )
