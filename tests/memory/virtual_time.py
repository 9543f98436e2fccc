"""The real executor in a world of virtual time: no byte moves and nobody sleeps, so times can be compared exactly.

The disk and the gpu link are serial queues of known rates, compute is a jump of the clock. Time passes only while the
model's thread waits. Completions run on a thread of their own, as real ones do.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hetero.io.engine import Request
from hetero.io.interrupts import Condition
from hetero.memory.chunk import Chunk, Segment
from hetero.memory.device import PassedEvent
from hetero.memory.executor import Executor
from hetero.memory.plan_types import ChunkSpec, Links, Plan, Trace
from hetero.memory.ring import Ring
from hetero.memory.schedule import stays_of
from hetero.memory.states import ExecutorStats

PATH = Path("virtual")
FIRST_ADDRESS, STAGING_ADDRESS = 1 << 40, 1 << 41


class World:
    """The clock and what is due."""

    def __init__(self, completions: ThreadPoolExecutor) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._num = 0
        self._completions = completions

    def at(self, due_s: float, run: Callable[[], None]) -> None:
        self._num += 1
        heapq.heappush(self._due, (due_s, self._num, run))

    def step(self) -> None:
        """Let time pass until the next completion has run."""
        assert self._due, "the model waits and nothing is under way: a deadlock"
        due_s, _, run = heapq.heappop(self._due)
        self.now_s = max(self.now_s, due_s)
        self._completions.submit(run).result()

    def compute(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self._due and self._due[0][0] <= end_s:
            self.step()
        self.now_s = end_s


class VirtualCondition(Condition):
    """Waiting is what lets time pass."""

    def __init__(self, world: World, lock: threading.RLock) -> None:
        super().__init__(lock)
        self._world = world

    def wait(self, timeout: float | None = None) -> bool:
        state = self._release_save()  # type: ignore[attr-defined]
        try:
            self._world.step()
        finally:
            self._acquire_restore(state)  # type: ignore[attr-defined]
        return True


class VirtualDisk:
    """What the executor uses of an engine: one request at a time, lowest (priority, submission) first."""

    def __init__(self, world: World, links: Links) -> None:
        self._world, self._links = world, links
        self._waiting: list[tuple[int, int, float, Request, Future[int]]] = []
        self._free_at_s = -1.0
        self._is_busy = False
        self._num = 0

    def submit(self, requests: Sequence[Request]) -> list[Future[int]]:
        futures: list[Future[int]] = [Future() for _ in requests]
        for request, future in zip(requests, futures, strict=True):
            self._num += 1
            heapq.heappush(self._waiting, (request.priority, self._num, self._world.now_s, request, future))
        self._next()
        return futures

    def _next(self) -> None:
        if self._is_busy:
            return
        while self._waiting:
            _, _, submitted_s, request, future = heapq.heappop(self._waiting)
            if future.set_running_or_notify_cancel():
                break
        else:
            return
        self._is_busy = True
        start_s = max(self._free_at_s, submitted_s)
        latency_s = self._links.disk_latency_s if start_s > self._free_at_s else 0.0
        self._free_at_s = start_s + latency_s + request.nbytes / self._links.disk_bytes_per_s
        self._world.at(self._free_at_s, lambda: self._done(future, request.nbytes))

    def _done(self, future: Future[int], nbytes: int) -> None:
        self._is_busy = False
        self._next()
        future.set_result(nbytes)


class _Copied:
    def __init__(self, world: World) -> None:
        self._world = world
        self.is_done = False

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        while not self.is_done:
            self._world.step()


class VirtualDevice:
    """What the executor uses of a device."""

    name = "virtual"

    def __init__(self, world: World, links: Links) -> None:
        self.torch_device = torch.device("cpu")
        self.has_gpu_tier = links.gpu_bytes_per_s is not None
        self._world, self._links = world, links
        self._free_at_s = 0.0

    def copy(
        self, dst: int, src: int, nbytes: int, *, to_device: bool, after: Sequence[Any] = (), on_done: Any = None
    ) -> _Copied:
        assert self._links.gpu_bytes_per_s is not None and to_device
        event = _Copied(self._world)
        start_s = max(self._free_at_s, self._world.now_s)
        self._free_at_s = start_s + nbytes / self._links.gpu_bytes_per_s + self._links.gpu_latency_s

        def done() -> None:
            event.is_done = True
            on_done(None)

        self._world.at(self._free_at_s, done)
        return event

    def record(self, uses: Any = ()) -> PassedEvent:
        return PassedEvent()

    def wait(self, event: Any) -> None:
        event.synchronize()

    def retire(self, address: int, nbytes: int) -> None:
        return


def chunk_of(spec: ChunkSpec) -> Chunk:
    segment = Segment(PATH, 0, spec.read_nbytes, 0)
    return Chunk(spec.chunk_id, f"chunk {spec.chunk_id}", spec.nbytes, spec.read_nbytes, (segment,), ())


@contextmanager
def executor_in(world: World, plan: Plan, specs: Sequence[ChunkSpec], trace: Trace, links: Links) -> Iterator[Executor]:
    """The executor that carries `plan` out, with its prefetch started."""
    has_gpu = links.gpu_bytes_per_s is not None
    first_ids = plan.gpu_resident if has_gpu else plan.cpu_resident
    ring_nbytes = plan.gpu_ring_nbytes if has_gpu else plan.cpu_ring_nbytes
    executor = Executor(
        [chunk_of(spec) for spec in specs],
        device=VirtualDevice(world, links),  # type: ignore[arg-type]
        engine=VirtualDisk(world, links),  # type: ignore[arg-type]
        files={PATH: None},  # type: ignore[dict-item]
        first=Ring(FIRST_ADDRESS, ring_nbytes),
        staging=Ring(STAGING_ADDRESS, plan.cpu_ring_nbytes) if has_gpu else None,
        resident=dict.fromkeys(first_ids, 0),
        host={spec.chunk_id: (0, spec.nbytes) for spec in specs if spec.chunk_id in plan.cpu_resident}
        if has_gpu
        else {},
        schedule=stays_of([moment.chunk_ids for moment in trace.moments], set(plan.schedule)),
    )
    executor._changed = VirtualCondition(world, executor._lock)
    executor.prefetch()
    try:
        yield executor
    finally:
        executor.close()


@dataclass(frozen=True, slots=True)
class Passes:
    """When each moment began and ended to compute, and what the executor had counted by then."""

    computed: list[tuple[float, float]]
    stats: ExecutorStats


def run_passes(plan: Plan, specs: Sequence[ChunkSpec], trace: Trace, links: Links, num_passes: int) -> Passes:
    """Carry out `num_passes` passes of a plan."""
    with ThreadPoolExecutor(1) as completions:
        world = World(completions)
        computed = []
        with executor_in(world, plan, specs, trace, links) as executor:
            for moment in trace.moments * num_passes:
                executor.acquire(moment.chunk_ids)
                start_s = world.now_s
                world.compute(moment.compute_s)
                computed.append((start_s, world.now_s))
                executor.release(moment.chunk_ids)
            return Passes(computed, replace(executor.stats))
