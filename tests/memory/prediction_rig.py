"""Models, budgets and links of known rates, to hold a plan's prediction against what the executor then does.

Nothing real is timed: the disk is a throttled backend over the page cache, the gpu link the emulated device's, compute
is a sleep. What is left is exactly what the simulation claims to know: the order, the overlap, the rings.

Note [measured parts]
    On a busy machine threads wake up late, by milliseconds where other processes want the cores. The links do not
    suffer (their due times are absolute), but a moment that waits for a chunk starts late and a sleep ends late. So
    each moment is timed from when it could have started (its request, or the due time of its last chunk) to its end,
    and the prediction that counts is the simulation with these times, pass by pass (what a ring absorbs of one long
    delay it does not absorb of its mean). How long moments wait for chunks is never measured.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from hetero.io.backends.base import Backend, Block, Completion
from hetero.io.backends.throttled import ThrottledBackend
from hetero.io.engine import Engine
from hetero.memory.device_emulated import EmulatedDevice
from hetero.memory.plan import make_plan, smallest_budgets
from hetero.memory.plan_types import Budgets, ChunkSpec, Links, Moment, Plan, Trace
from hetero.memory.schedule import stays_of
from hetero.memory.simulate import simulate
from tests.memory.executor_rig import Rig, rig

KIB = 1 << 10
MB_PER_S = 1e6
NUM_WARM_UP, NUM_MEASURED = 1, 4


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of chunks, which of them each moment uses, and how the moments share the compute time."""

    sizes_kib: tuple[int, ...]
    moments: tuple[tuple[int, ...], ...]
    weights: tuple[float, ...]


def _layers(num: int, sizes_kib: Sequence[int], head_kib: int, weights: Sequence[float]) -> Model:
    """Layers of a few modules each, as a transformer has them, and a head."""
    sizes = (*(tuple(sizes_kib) * num), head_kib)
    return Model(sizes, tuple((i,) for i in range(len(sizes))), (*(tuple(weights) * num), 1.0))


MODELS = {
    "even": Model((1024,) * 12, tuple((i,) for i in range(12)), (1.0,) * 12),
    "layers": _layers(6, (512, 1280), 2560, (1.0, 1.0)),
    # Compute is anything but even: attention over a long context costs more than the rest.
    "uneven": _layers(6, (512, 1280), 2560, (4.0, 0.5)),
    # Experts: moments of two chunks; the head is used at both ends of the pass, one chunk by two moments in a row.
    "shared": Model(
        (1536, *(768,) * 12),
        ((0,), (1, 2), (3, 4), (5, 6), (6,), (7,), (8, 9), (10, 11), (12,), (0,)),
        (1.0,) * 10,
    ),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """Shares are of the model's bytes, on top of the smallest budgets; rates in MB/s; compute in ms per pass."""

    model: str
    cpu_share: float
    disk: float
    compute_ms: float
    gpu_share: float | None = None
    link: float | None = None
    disk_latency_ms: float = 0.0
    link_latency_ms: float = 0.0
    expected: str = ""
    """The bottleneck, where the setting was made for one."""

    @property
    def links(self) -> Links:
        return Links(
            self.disk * MB_PER_S,
            None if self.link is None else self.link * MB_PER_S,
            self.disk_latency_ms / 1e3,
            self.link_latency_ms / 1e3,
        )


SETTINGS: dict[str, Setting] = {
    "cpu-disk": Setting("even", 0.4, 70, 40, expected="disk"),
    "cpu-compute": Setting("even", 0.4, 200, 150, expected="compute"),
    "cpu-balanced": Setting("layers", 0.5, 80, 100),
    "cpu-smallest": Setting("layers", 0.0, 170, 90),
    "cpu-uneven": Setting("uneven", 0.35, 100, 120),
    "cpu-shared": Setting("shared", 0.3, 95, 90),
    "cpu-latency": Setting("even", 0.0, 250, 90, disk_latency_ms=3.0),
    "gpu-link": Setting("even", 1.0, 100, 40, gpu_share=0.25, link=90, expected="gpu link"),
    "gpu-disk": Setting("even", 0.25, 70, 40, gpu_share=0.25, link=270, expected="disk"),
    "gpu-compute": Setting("layers", 0.3, 170, 170, gpu_share=0.3, link=200, expected="compute"),
    "gpu-balanced": Setting("layers", 0.3, 55, 110, gpu_share=0.3, link=95),
    # One transfer after the other, each waiting for threads to wake up: long ones, so that this is little of them.
    "gpu-smallest": Setting("layers", 0.0, 80, 180, gpu_share=0.0, link=80),
    "gpu-uneven": Setting("uneven", 0.3, 60, 110, gpu_share=0.2, link=110),
    "gpu-shared": Setting("shared", 0.35, 60, 90, gpu_share=0.25, link=100),
    "gpu-latency": Setting("even", 0.6, 80, 75, gpu_share=0.2, link=170, disk_latency_ms=1.0, link_latency_ms=3.0),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds per steady pass, as planned, as simulated with the compute times of this run, and as measured.

    The bytes are those of all NUM_MEASURED passes. What is read ahead where they begin and end may differ, by what the
    rings hold at most: `slack_nbytes`.
    """

    plan: Plan
    total_nbytes: int
    planned_s: float
    predicted_s: float
    measured_s: float
    disk_nbytes: int
    gpu_link_nbytes: int

    @property
    def slack_nbytes(self) -> int:
        return self.plan.gpu_ring_nbytes + self.plan.cpu_ring_nbytes

    @property
    def ratio(self) -> float:
        return self.measured_s / self.predicted_s


def run_setting(setting: Setting, folder: Path) -> Outcome:
    """Plan, then carry the plan out and time its steady passes. Blocks for about a second."""
    model, links = MODELS[setting.model], setting.links
    # Whole pages that do not start on a page: the read, aligned outwards, takes one page more.
    sizes = [kib * KIB - 4096 for kib in model.sizes_kib]
    has_gpu = setting.gpu_share is not None
    specs = _specs(folder, sizes)
    total_nbytes = sum(spec.nbytes for spec in specs)
    share_s = setting.compute_ms / 1e3 / sum(model.weights)
    moments = zip(model.moments, model.weights, strict=True)
    trace = Trace("decode", tuple(Moment(f"m{i}", ids, w * share_s) for i, (ids, w) in enumerate(moments)))
    least = smallest_budgets(specs, trace, gpu=has_gpu)
    budgets = Budgets(
        None if least.gpu_nbytes is None else least.gpu_nbytes + _pages((setting.gpu_share or 0) * total_nbytes),
        least.cpu_nbytes + _pages(setting.cpu_share * total_nbytes),
    )
    plan = make_plan(specs, trace, budgets, links)
    due = _DueTimes()
    options: dict[str, Any] = {"ring_nbytes": plan.cpu_ring_nbytes, "resident": sorted(plan.cpu_resident)}
    if has_gpu:
        options = {
            "device": _WatchedDevice(2 * total_nbytes, links, due),
            "ring_nbytes": plan.gpu_ring_nbytes,
            "resident": sorted(plan.gpu_resident),
            "host": sorted(plan.cpu_resident),
            "staging_nbytes": plan.cpu_ring_nbytes,
        }
    engine = Engine(backend="buffered", wrap_backend=lambda inner: _WatchedDisk(inner, links, due))
    schedule = stays_of([moment.chunk_ids for moment in trace.moments], set(plan.schedule))
    with rig(folder, sizes, schedule=schedule, engine=engine, **options) as r:
        measured = _Passes(r, trace, due)
        assert r.executor.stats.num_demands == 0
    passes = (
        Trace("decode", tuple(replace(m, compute_s=s) for m, s in zip(trace.moments, of_pass, strict=True)))
        for of_pass in measured.occupied
    )
    predicted_s = fmean(simulate(plan, specs, as_seen, links, with_spans=False).pass_s for as_seen in passes)
    return Outcome(
        plan=plan,
        total_nbytes=total_nbytes,
        planned_s=plan.prediction.time_s,
        predicted_s=predicted_s,
        measured_s=fmean(measured.times_s),
        disk_nbytes=measured.disk_nbytes,
        gpu_link_nbytes=measured.gpu_link_nbytes,
    )


class _DueTimes:
    """When the last read, or copy, of each place was due to end."""

    def __init__(self) -> None:
        self.reads: dict[int, float] = {}  # by file offset
        self.copies: dict[int, float] = {}  # by destination


class _WatchedDisk(ThrottledBackend):
    def __init__(self, inner: Backend, links: Links, due: _DueTimes) -> None:
        super().__init__(inner, bytes_per_s=links.disk_bytes_per_s, latency_s=links.disk_latency_s)
        self._due = due
        self._offsets: dict[int, int] = {}

    def push(self, blocks: Sequence[Block]) -> None:
        self._offsets.update((block.block_id, block.offset) for block in blocks)
        super().push(blocks)

    def collect(self, timeout_s: float) -> list[Completion]:
        told = super().collect(timeout_s)
        for completion in told:
            self._due.reads[self._offsets.pop(completion.block_id)] = completion.end_ns / 1e9
        return told


class _WatchedDevice(EmulatedDevice):
    """Poison and the race detector take time of their own, so they are off; other tests have them on."""

    def __init__(self, capacity_nbytes: int, links: Links, due: _DueTimes) -> None:
        rate, latency_s = links.gpu_bytes_per_s, links.gpu_latency_s
        super().__init__(
            capacity_nbytes, bandwidth_bytes_per_s=rate, latency_s=latency_s, poison=False, detect_races=False
        )
        self._due = due

    def copy(self, dst: int, src: int, nbytes: int, *, on_done: Any = None, **options: Any) -> Any:
        def done(error: BaseException | None) -> None:
            self._due.copies[dst] = self._links[True]._free_at_s
            on_done(error)

        return super().copy(dst, src, nbytes, on_done=done, **options)


class _Passes:
    """Carries passes out and keeps what the steady ones took: seconds per pass and per moment, bytes in all."""

    def __init__(self, r: Rig, trace: Trace, due: _DueTimes) -> None:
        self._executor, self._trace, self._due = r.executor, trace, due
        self.times_s: list[float] = []
        self.occupied: list[list[float]] = []
        stats = r.executor.stats
        r.executor.prefetch()
        for number in range(NUM_WARM_UP + NUM_MEASURED):
            if number == NUM_WARM_UP:
                before = (stats.read_nbytes, stats.copied_nbytes)
            start_s = time.perf_counter()
            occupied = [self._moment(moment) for moment in trace.moments]
            if number >= NUM_WARM_UP:
                self.times_s.append(time.perf_counter() - start_s)
                self.occupied.append(occupied)
        self.disk_nbytes = stats.read_nbytes - before[0]
        self.gpu_link_nbytes = stats.copied_nbytes - before[1]

    def _moment(self, moment: Moment) -> float:
        """Seconds from when the moment could have started, Note [measured parts]."""
        could_start_s = time.perf_counter()
        entries = self._executor.acquire(moment.chunk_ids)
        granted_s = time.perf_counter()
        for entry in entries:
            if entry.is_resident:
                continue
            due_s = self._due.copies.get(entry.space.address)
            if due_s is None:
                due_s = self._due.reads[entry.chunk.segments[0].offset]
            could_start_s = max(could_start_s, due_s)
        _sleep_until(granted_s + moment.compute_s)
        self._executor.release(moment.chunk_ids)
        return time.perf_counter() - could_start_s


def _specs(folder: Path, sizes: list[int]) -> list[ChunkSpec]:
    from tests.memory.executor_rig import write_chunks

    chunks, _ = write_chunks(folder, sizes)
    return [ChunkSpec(chunk_id=c.chunk_id, nbytes=c.nbytes, read_nbytes=c.read_nbytes) for c in chunks]


def _pages(nbytes: float) -> int:
    return int(nbytes) // 4096 * 4096


def _sleep_until(moment_s: float) -> None:
    while (left_s := moment_s - time.perf_counter()) > 0:
        time.sleep(left_s)
