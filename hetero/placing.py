"""Where a wrapped model's weights are: their homes, the rings that others stream through, and making room."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict

from torch import nn

from hetero.io.arena import round_up
from hetero.io.engine import Engine
from hetero.io.errors import OutOfMemoryError
from hetero.io.scratch import ScratchStore
from hetero.memory.budget import Ledger
from hetero.memory.device import Device
from hetero.memory.executor import Executor
from hetero.memory.homes import WEIGHTS, Homes
from hetero.memory.plan_types import Plan
from hetero.memory.ring import Ring
from hetero.memory.states import ExecutorStats
from hetero.memory.weights import Place, WeightChunk

RING = "ring"
NUM_SPANS_KEPT = 1 << 16


class Placing:
    """Owns homes, rings and the executor; everything else is the caller's and outlives it.

    `own` are the chunks of each module's own parameters, by id of the module. A chunk whose home is in the first tier
    is computed on where it is; others pass through the ring, which exists only while there are any. Whoever made it
    gives the model its memory back at the end: `close_executor`, then `homes.restore`.
    """

    def __init__(
        self,
        model: nn.Module,
        chunks: Sequence[WeightChunk],
        *,
        device: Device,
        engine: Engine,
        store: ScratchStore | None,
        ledger: Ledger,
    ) -> None:
        self.chunks = list(chunks)
        self.first = "gpu" if device.has_gpu_tier else "cpu"
        self.is_remote = device.torch_device.type != "cpu"  # homes in RAM cannot be computed on
        self.spans: deque[tuple[str, str, float, float]] = deque(maxlen=NUM_SPANS_KEPT)
        self.executor: Executor | None = None
        self._device, self._engine, self._store, self._ledger = device, engine, store, ledger
        by_parameter = {id(view.parameter): chunk for chunk in chunks for view in chunk.views}
        self.own = {
            id(module): tuple(
                dict.fromkeys(by_parameter[id(p)] for p in parameters_of(module) if id(p) in by_parameter)
            )
            for module in model.modules()
        }
        self._moments = _moments_of(model, self.own)
        others = [p for p in model.parameters() if id(p) not in by_parameter] + list(model.buffers())
        self.homes = Homes(self.chunks, device=device, engine=engine, ledger=ledger, store=store, others=others)
        self.ring_nbytes = self.staging_nbytes = 0
        self.collect_onlookers()
        self.measure_rings()
        self._rings = ExitStack()
        self._ring_sizes = 0, 0  # of the first tier's ring and the staging ring, as last asked for
        self._past_stats: list[ExecutorStats] = []

    # -- what Streaming adds ------------------------------------------------------------------------------------------

    def _opened(self, executor: Executor) -> None:
        """The rings were made."""

    def _closed(self) -> None:
        """The rings are gone."""

    def _is_in_use(self, chunk: WeightChunk) -> bool:
        """Whether a module computes on a chunk now, so that it cannot leave."""
        return chunk.num_open > 0

    # -- what is where ------------------------------------------------------------------------------------------------

    @property
    def streamed(self) -> list[WeightChunk]:
        return [chunk for chunk in self.chunks if chunk.place is not Place.FIRST]

    def watched(self) -> list[WeightChunk]:
        """Chunks in memory that tensors outside the model keep there."""
        return [chunk for chunk in self.chunks if chunk.place is not Place.DISK and self.homes.is_watched(chunk)]

    def collect_onlookers(self) -> bool:
        """Collect garbage if anything stays: a dead cycle may look at it, such as an error's traceback. True if there
        was any."""
        return bool(self.watched()) and gc.collect() > 0

    def measure_rings(self) -> None:
        """See how large the rings must be for all that streams, or may have to."""
        watched = {chunk.chunk_id: chunk for chunk in self.watched()}
        free = [c for c in self.chunks if c.chunk_id not in watched or c.place is not Place.FIRST]
        self.ring_nbytes = self._largest_moment(free)
        below = [c.slot_nbytes for c in self.chunks if c.chunk_id not in watched]
        self.staging_nbytes = max(below, default=0)

    def _largest_moment(self, chunks: Sequence[WeightChunk]) -> int:
        """Bytes of slots that these chunks need at once at most."""
        ids = {chunk.chunk_id for chunk in chunks}
        return max((sum(c.slot_nbytes for c in moment if c.chunk_id in ids) for moment in self._moments), default=0)

    # -- entering and placing -----------------------------------------------------------------------------------------

    def enter(self, tell: Callable[[int, int], None]) -> None:
        """Book the weights where they are; what the budget does not hold goes to disk, last used first, unless it has
        to stay.

        `tell` gets the bytes that went there so far, and those that will in all.
        """
        tier = self.homes.tier_of(self.chunks[0].place) if self.chunks else "cpu"
        room = self._ledger.free(tier)
        if sum(chunk.nbytes for chunk in self.chunks) > room:
            room -= self.ring_nbytes if self.first == "cpu" else self.staging_nbytes
        leaving = []
        watched = {chunk.chunk_id for chunk in self.watched()}
        for chunk in sorted(self.chunks, key=lambda chunk: chunk.chunk_id not in watched):
            if chunk.nbytes <= room or chunk.chunk_id in watched:
                room -= chunk.nbytes
                self.homes.book(chunk)
            else:
                leaving.append(chunk)
        moved_nbytes, total_nbytes = 0, sum(chunk.nbytes for chunk in leaving)
        for chunk in leaving:
            self.homes.move(chunk, Place.DISK, is_booked=False)
            if chunk.place is not Place.DISK:  # another thread has begun to look at it
                self.homes.book(chunk)
            moved_nbytes += chunk.nbytes
            tell(moved_nbytes, total_nbytes)
        if self.streamed:
            self.open_executor(self.ring_nbytes, self.staging_nbytes)

    def place(self, plan: Plan, room: Mapping[str, int], follow: Callable[[], None]) -> None:
        """Carry out a plan, between passes: moves in an order in which there is room for each, then the rings. Blocks.

        `room`: bytes per tier for weights and rings. `follow` is called after moves, and brings along what has to be
        where the weights are. What the plan does not speak of stays where it is if it can.
        What tensors outside the model have begun to look at stays where it is, whatever the plan says.
        """
        self.close_executor()
        goals = self._goals(plan, room)
        pending = [chunk for chunk in self.chunks if chunk.place is not goals[chunk.chunk_id]]
        while pending:
            waiting = [chunk for chunk in pending if not self._try_move(chunk, goals[chunk.chunk_id])]
            follow()
            if len(waiting) == len(pending):  # two tiers would swap: through the disk, then
                stuck = [chunk for chunk in waiting if self.homes.has_disk and chunk.place is not Place.DISK]
                if not stuck:
                    break
                num_moves = self.homes.num_moves
                self.homes.move(stuck[0], Place.DISK)
                if self.homes.num_moves == num_moves:  # others have begun to look at it
                    break
            pending = waiting
        planned = plan.gpu_resident | plan.cpu_resident | set(plan.schedule)
        streamed = {chunk.chunk_id for chunk in self.streamed} & planned
        if streamed:
            self._open_planned(plan, is_as_planned=streamed == set(plan.schedule))

    def _open_planned(self, plan: Plan, *, is_as_planned: bool) -> None:
        """Open the rings of a plan; larger ones where what had to stay makes others stream."""
        sizes = plan.gpu_ring_nbytes if self.first == "gpu" else plan.cpu_ring_nbytes, plan.cpu_ring_nbytes
        ring = sizes[0] if is_as_planned else max(sizes[0], self._largest_moment(self.streamed))
        on_disk = [chunk.slot_nbytes for chunk in self.chunks if chunk.place is Place.DISK]
        staging = max([sizes[1], *on_disk])
        try:
            self.open_executor(ring, staging)
        except OutOfMemoryError:
            if not self.watched():
                raise
            self.measure_rings()
            self._reopen(self.ring_nbytes, self.staging_nbytes)

    def _goals(self, plan: Plan, room: Mapping[str, int]) -> dict[int, Place]:
        """Where each chunk is to go, by id. What the plan does not speak of may need a larger staging ring."""
        staging_nbytes = plan.cpu_ring_nbytes
        while True:
            goals = self._goals_beside(staging_nbytes, plan, room)
            to_disk = [c.slot_nbytes for c in self.chunks if goals[c.chunk_id] is Place.DISK and self.first == "gpu"]
            if max(to_disk, default=0) <= staging_nbytes:
                return goals
            staging_nbytes = max(to_disk)

    def _goals_beside(self, staging_nbytes: int, plan: Plan, room: Mapping[str, int]) -> dict[int, Place]:
        first = plan.cpu_resident if self.first == "cpu" else plan.gpu_resident
        second = plan.cpu_resident if self.first == "gpu" else frozenset()
        streamed, below = set(plan.schedule), Place.DISK if self.homes.has_disk else Place.CPU
        rings = {"gpu": plan.gpu_ring_nbytes, "cpu": staging_nbytes}
        left = {tier: nbytes - _whole_pages(rings.get(tier, 0)) for tier, nbytes in room.items()}
        goals = {}
        kept = {chunk.chunk_id for chunk in self.chunks if self.homes.is_watched(chunk)}
        planned = first | second | streamed
        for chunk in sorted(self.chunks, key=lambda c: (c.chunk_id not in kept, c.chunk_id not in planned)):
            if chunk.chunk_id in kept:
                goal = chunk.place
            elif chunk.chunk_id in first:
                goal = Place.FIRST
            elif chunk.chunk_id in second and chunk.nbytes <= left["cpu"]:  # what had to stay may fill it
                goal = Place.CPU
            elif chunk.chunk_id in streamed | second or chunk.nbytes > left[self.homes.tier_of(chunk.place)]:
                goal = below
            else:
                goal = chunk.place
            goals[chunk.chunk_id] = goal
            left[self.homes.tier_of(goal)] -= chunk.nbytes
        return goals

    def _try_move(self, chunk: WeightChunk, goal: Place) -> bool:
        if goal is not Place.DISK and not self._ledger.can_take(self.homes.tier_of(goal), chunk.nbytes):
            return False
        self.homes.move(chunk, goal)
        return True

    def open_executor(self, ring_nbytes: int, staging_nbytes: int) -> None:
        """Allocate the rings and start the executor over them. Raises OutOfMemoryError with nothing left behind."""
        self._ring_sizes = ring_nbytes, staging_nbytes
        rings: dict[str, Ring] = {}
        sizes = {self.first: ring_nbytes}
        if self.first == "gpu" and any(chunk.place is Place.DISK for chunk in self.chunks):
            sizes["cpu"] = staging_nbytes
        keepers = []
        try:
            for tier, nbytes in sizes.items():
                nbytes = _whole_pages(nbytes)
                self._ledger.take(tier, RING, nbytes)
                self._rings.callback(self._ledger.give, tier, RING, nbytes)
                allocate = self._device.allocate if tier == "gpu" else self._device.allocate_host
                arena = allocate(nbytes, name=RING)
                self._rings.callback(arena.close)
                rings[tier] = Ring(arena.address, nbytes)
                if tier == self.first:
                    keepers.append(arena.keeper)
        except BaseException:
            self._rings.close()
            raise
        files = {self._store.path: self._store.file} if self._store is not None and self._store.file is not None else {}
        # Behind a gpu tier every transfer passes through RAM: a home there is copied from where it is.
        staging = rings.get("cpu") or Ring(0, 0) if self.first == "gpu" else None
        self.executor = Executor(
            [chunk.chunk() for chunk in self.chunks],
            device=self._device,
            engine=self._engine,
            files=files,
            first=rings[self.first],
            staging=staging,
            resident={},
            host={chunk.chunk_id: chunk.host_range for chunk in self.chunks if chunk.place is Place.CPU},
            schedule=(),
            keepers=keepers,
        )
        self.executor.spans = self.spans
        self._opened(self.executor)

    def close_executor(self) -> None:
        """End the executor and free the rings. Blocks until nothing writes to them. Idempotent."""
        if self.executor is not None:
            self.executor.close()
            self._engine.quiesce()  # an interrupted executor no longer knows what still writes to its rings
            self._past_stats.append(self.executor.stats)
            self.executor = None
            self._rings.close()
            self._closed()

    def shrink(self) -> None:
        """Between passes: give back what the rings have beyond the largest moment. Blocks."""
        if self.executor is None:
            return
        self.measure_rings()
        if self._ring_sizes[0] > self.ring_nbytes:
            self.close_executor()
            self._reopen(self.ring_nbytes, self.staging_nbytes)

    def _reopen(self, ring_nbytes: int, staging_nbytes: int) -> None:
        """Open the executor, with room in RAM for what room was made by since these sizes were right."""
        if self.first == "gpu" and any(chunk.place is Place.DISK for chunk in self.chunks):
            staging_nbytes = max(staging_nbytes, self.staging_nbytes)
            self.make_host_room(_whole_pages(staging_nbytes))
        self.open_executor(ring_nbytes, staging_nbytes)

    def make_room(self, nbytes: int) -> bool:
        """Send weights out of the first tier until `nbytes` are free, if so many can go. Between or in passes; blocks.

        True if any went. Raises OutOfMemoryError when there is no room for the rings that they then need.
        """
        num_moves, gradients_nbytes = self.homes.num_moves, 0
        need = nbytes + (0 if self.executor is not None else _whole_pages(self.ring_nbytes))
        for chunk in self.chunks:  # those that backward needs last
            if self._ledger.free(self.first) >= need:
                break
            if chunk.place is Place.FIRST and not self._is_in_use(chunk):
                goal = self._below(chunk, gradients_nbytes)
                if goal is None:
                    continue
                num_before = self.homes.num_moves
                self.homes.move(chunk, goal)
                if self.homes.num_moves == num_before:  # others have begun to look at it
                    continue
                gradients_nbytes += chunk.trainable_nbytes
                if self.executor is not None and goal is Place.CPU:
                    self.executor.set_host(chunk.chunk_id, chunk.host_range)
        self._ensure_executor()
        return self.homes.num_moves > num_moves

    def _ensure_executor(self) -> None:
        if self.executor is None and self.streamed:
            self._reopen(self.ring_nbytes, self.staging_nbytes)

    def make_host_room(self, nbytes: int) -> None:
        """Behind a gpu tier, send weights from RAM to disk until `nbytes` are free there, if so many can go. No
        lease may be open in a ring."""
        if self.first != "gpu" or not self.homes.has_disk or self._ledger.free("cpu") >= nbytes:
            return
        was_open, (ring_nbytes, staging_nbytes) = self.executor is not None, self._ring_sizes
        least_nbytes = _whole_pages(self.staging_nbytes) if was_open else 0
        if was_open:
            self.close_executor()
        for chunk in self.chunks:
            if self._ledger.free("cpu") >= nbytes + least_nbytes:
                break
            if chunk.place is Place.CPU:
                self.homes.move(chunk, Place.DISK)
        if was_open:
            left_nbytes = self._ledger.free("cpu") - nbytes
            fits = self.staging_nbytes <= _whole_pages(staging_nbytes) <= left_nbytes
            self.open_executor(ring_nbytes, staging_nbytes if fits else self.staging_nbytes)

    def _below(self, chunk: WeightChunk, gradients_nbytes: int) -> Place | None:
        """Where a chunk can go, beside gradients of others that went: each goes where its weight is."""
        gradients_nbytes = gradients_nbytes + chunk.trainable_nbytes if self.is_remote else 0
        if self.first == "gpu" and self._ledger.can_take("cpu", chunk.nbytes + gradients_nbytes):
            return Place.CPU
        return Place.DISK if self.homes.has_disk else None

    def recover(self) -> None:
        """After an interrupt, between passes: homes are whole, so everything else is made anew. Blocks."""
        for chunk in self.chunks:
            chunk.end_leases()
        executor, self.executor = self.executor, None
        if executor is not None:
            executor.close()
            self._past_stats.append(executor.stats)
        self._engine.quiesce()
        self._device.synchronize()
        for chunk in self.chunks:
            chunk.adopt()
        self._rings.close()
        self._closed()
        for tier in self._ledger.tiers():
            self._ledger.correct(tier, RING, 0)
            held = sum(chunk.nbytes for chunk in self.chunks if self.homes.tier_of(chunk.place) == tier)
            self._ledger.correct(tier, WEIGHTS, held if tier != "disk" else 0)
        if self.streamed:
            ring_nbytes, staging_nbytes = self._ring_sizes
            try:
                self._reopen(max(ring_nbytes, self._largest_moment(self.streamed)), staging_nbytes)
            except OutOfMemoryError:  # a plan carried out in part has put weights where these rings were
                self.measure_rings()
                self.make_room(0)

    def stats(self) -> Mapping[str, float]:
        """The executors' counters, those of earlier plans included."""
        every = [*self._past_stats, *([self.executor.stats] if self.executor is not None else [])]
        total = dict.fromkeys(asdict(ExecutorStats()), 0.0)
        for stats in every:
            for name, value in asdict(stats).items():
                total[name] += value
        return total


def _whole_pages(ring_nbytes: int) -> int:
    """What a ring takes: a page at least."""
    return round_up(max(ring_nbytes, 1))


def parameters_of(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module._parameters.values() if parameter is not None]


def _moments_of(model: nn.Module, own: Mapping[int, Sequence[WeightChunk]]) -> list[tuple[WeightChunk, ...]]:
    """For each module, the chunks that it and those around it need at once."""
    moments = {}
    for path, _ in model.named_modules(remove_duplicate=False):
        parts = path.split(".") if path else []
        around = [model.get_submodule(".".join(parts[:i])) for i in range(len(parts) + 1)]
        chunks = {chunk.chunk_id: chunk for module in around for chunk in own.get(id(module), ())}
        moments[tuple(chunks)] = tuple(chunks.values())
    return list(moments.values())
