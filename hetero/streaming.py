"""The weights of a wrapped model: where they are, their leases, and making room."""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hetero.copies import Copies
from hetero.io.engine import Engine
from hetero.io.errors import OutOfMemoryError
from hetero.io.scratch import ScratchStore
from hetero.memory.budget import Ledger
from hetero.memory.chunk import align_up
from hetero.memory.device import Device
from hetero.memory.executor import Executor
from hetero.memory.homes import WEIGHTS, Homes
from hetero.memory.kept import KeptViews
from hetero.memory.pipeline import InterruptedPassError
from hetero.memory.plan_types import Plan
from hetero.memory.ring import Ring
from hetero.memory.schedule import Run
from hetero.memory.states import ExecutorStats, Residency
from hetero.memory.weights import Place, WeightChunk, num_holders, span_of

RING = "ring"
NUM_SPANS_KEPT = 1 << 16


class Lease(NamedTuple):
    """Chunks that are shown where they are computed on: from slots, whose numbers are `slot_ids`, or from copies.
    Those that `stay` are at home there."""

    chunks: tuple[WeightChunk, ...]
    slot_ids: tuple[int, ...]
    stay: tuple[WeightChunk, ...]


class Streaming:
    """Owns homes, rings and the executor; everything else is the caller's and outlives it.

    `own` are the chunks of each module's own parameters, by id of the module. A chunk whose home is in the first tier
    is computed on where it is; others pass through the ring, which exists only while there are any. `reserve` books
    bytes of a tier for a holder, and makes room for them first.
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
        reserve: Callable[[str, str, int], None],
    ) -> None:
        self.chunks = list(chunks)
        self.first = "gpu" if device.has_gpu_tier else "cpu"
        self.spans: deque[tuple[str, str, float, float]] = deque(maxlen=NUM_SPANS_KEPT)
        self.executor: Executor | None = None
        self.num_unleased = 0
        self._collect_after_s = 0.0
        self._device, self._engine, self._store, self._ledger = device, engine, store, ledger
        self._parameters = list(model.parameters())
        self._chunk_of = by_parameter = {id(view.parameter): chunk for chunk in chunks for view in chunk.views}
        self.own = {
            id(module): tuple(
                dict.fromkeys(by_parameter[id(p)] for p in parameters_of(module) if id(p) in by_parameter)
            )
            for module in model.modules()
        }
        self._moments = _moments_of(model, self.own)
        others = [p for p in self._parameters if id(p) not in by_parameter] + list(model.buffers())
        self.homes = Homes(self.chunks, device=device, engine=engine, ledger=ledger, store=store, others=others)
        self.ring_nbytes = self.staging_nbytes = 0
        self.collect_onlookers()
        self.measure_rings()
        self._rings = ExitStack()
        self._ring_sizes = 0, 0
        self._past_stats: list[ExecutorStats] = []
        self._slot_owners: dict[int, WeightChunk] = {}
        self.is_remote = device.torch_device.type != "cpu"
        self._num_users: Counter[int] = Counter()  # of chunks that stay
        self._copies = Copies(device, ledger, self.first, reserve)
        self._homes_at: dict[int, list[WeightChunk]] = {}
        self._num_moves_seen = -1
        self._phase = ""  # the one that runs
        self.kept_views = KeptViews({chunk.chunk_id: chunk for chunk in chunks}, device.torch_device)

    @property
    def streamed(self) -> list[WeightChunk]:
        return [chunk for chunk in self.chunks if chunk.place is not Place.FIRST]

    def staying(self) -> list[WeightChunk]:
        """Chunks in memory that tensors outside the model keep there."""
        return [chunk for chunk in self.chunks if chunk.place is not Place.DISK and self.homes.stays(chunk)]

    def collect_onlookers(self) -> bool:
        """Collect garbage if anything stays: a dead cycle may look at it, such as an error's traceback. True if there
        was any."""
        return bool(self.staying()) and gc.collect() > 0

    def measure_rings(self) -> None:
        """See how large the rings must be for all that streams, or may have to."""
        staying = {chunk.chunk_id: chunk for chunk in self.staying()}
        free = [c for c in self.chunks if c.chunk_id not in staying or c.place is not Place.FIRST]
        self.ring_nbytes = self._largest_moment(free)
        below = [c.slot_nbytes for c in self.chunks if c.chunk_id not in staying]
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
        staying = {chunk.chunk_id for chunk in self.staying()}
        for chunk in sorted(self.chunks, key=lambda chunk: chunk.chunk_id not in staying):
            if chunk.nbytes <= room or chunk.chunk_id in staying:
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
            if not self.staying():
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
        left = {tier: nbytes - align_up(max(rings.get(tier, 0), 1)) for tier, nbytes in room.items()}
        goals = {}
        kept = {chunk.chunk_id for chunk in self.chunks if self.homes.stays(chunk)}
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
                nbytes = align_up(max(nbytes, 4096))
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
        self.kept_views.follow(self.executor)

    def close_executor(self) -> None:
        if self.executor is not None:
            self.executor.close()
            self._engine.quiesce()  # an interrupted executor no longer knows what still writes to its rings
            self._past_stats.append(self.executor.stats)
            self.executor = None
            self._rings.close()
            self._slot_owners.clear()

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
            self.make_host_room(align_up(max(staging_nbytes, 4096)))
        self.open_executor(ring_nbytes, staging_nbytes)

    def make_room(self, nbytes: int) -> bool:
        """Send weights out of the first tier until `nbytes` are free, if so many can go. Between or in passes.

        True if any went.
        """
        self._copies.collect()
        num_moves = self.homes.num_moves
        need = nbytes + (0 if self.executor is not None else align_up(max(self.ring_nbytes, 4096)))
        for chunk in self.chunks:  # those that backward needs last
            if self._ledger.free(self.first) >= need:
                break
            if chunk.place is Place.FIRST and chunk.num_open == 0 and not self._num_users[chunk.chunk_id]:
                goal = self._below(chunk)
                if goal is None:
                    continue
                num_before = self.homes.num_moves
                self.homes.move(chunk, goal)
                if self.executor is not None and goal is Place.CPU and self.homes.num_moves > num_before:
                    self.executor.set_host(chunk.chunk_id, chunk.host_range)
        self._ensure_executor()
        return self.homes.num_moves > num_moves

    def _ensure_executor(self) -> None:
        if self.executor is None and self.streamed:
            self._reopen(self.ring_nbytes, self.staging_nbytes)

    def make_host_room(self, nbytes: int) -> None:
        """Behind a gpu tier, send weights from RAM to disk until `nbytes` are free there, if so many can go. Between
        passes."""
        if self.first != "gpu" or not self.homes.has_disk or self._ledger.free("cpu") >= nbytes:
            return
        was_open, (ring_nbytes, staging_nbytes) = self.executor is not None, self._ring_sizes
        least_nbytes = align_up(max(self.staging_nbytes, 4096)) if was_open else 0
        if was_open:
            self.close_executor()
        for chunk in self.chunks:
            if self._ledger.free("cpu") >= nbytes + least_nbytes:
                break
            if chunk.place is Place.CPU:
                self.homes.move(chunk, Place.DISK)
        if was_open:
            left_nbytes = self._ledger.free("cpu") - nbytes
            fits = self.staging_nbytes <= align_up(max(staging_nbytes, 4096)) <= left_nbytes
            self.open_executor(ring_nbytes, staging_nbytes if fits else self.staging_nbytes)

    def _below(self, chunk: WeightChunk) -> Place | None:
        gradient_nbytes = chunk.trainable_nbytes if self.is_remote else 0  # goes where its weight is
        if self.first == "gpu" and self._ledger.can_take("cpu", chunk.nbytes + gradient_nbytes):
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
        self._num_users.clear()
        for chunk in self.chunks:
            chunk.adopt()
        self._rings.close()
        self._slot_owners.clear()
        for tier in self._ledger.tiers():
            self._ledger.correct(tier, RING, 0)
            held = sum(chunk.nbytes for chunk in self.chunks if self.homes.tier_of(chunk.place) == tier)
            self._ledger.correct(tier, WEIGHTS, held if tier != "disk" else 0)
        if self.streamed:
            ring_nbytes, staging_nbytes = self._ring_sizes
            self._reopen(max(ring_nbytes, self._largest_moment(self.streamed)), staging_nbytes)

    def adopt(self) -> None:
        """Between passes: see what users have put in the place of weights."""
        for chunk in self.chunks:
            self._adopt(chunk)

    @property
    def has_kept_views(self) -> bool:
        """Whether somebody looks at memory of ours that leases have left; each pass has to bring its values there."""
        return self.kept_views.has_any or self._copies.has_any

    def away(self) -> list[nn.Parameter]:
        """Parameters that show memory of the user's own."""
        return [chunk.views[i].parameter for chunk in self.chunks for i in chunk.away]

    # -- leases -------------------------------------------------------------------------------------------------------

    def restart(self, runs: Sequence[Run], phase: str = "") -> None:
        """A pass begins (its order and phase) or ends (nothing): before and after it homes are the only copies.

        Views of slots that somebody keeps get today's values when one begins.
        """
        self._phase = phase
        self._copies.collect()
        if phase:
            self.kept_views.refresh()
            self._copies.refresh()
        if self.executor is not None:
            self.executor.restart(runs)
            for chunk in self.streamed:
                chunk.version = chunk.counter()

    def lease(self, chunks: Sequence[WeightChunk]) -> Lease | None:
        """Show the chunks' parameters leased bytes until `release`. None: there is no room for all of them at once,
        so the module computes on the homes, which is right and slow; where it cannot, on copies, or OutOfMemoryError
        is raised."""
        stay = tuple(chunk for chunk in chunks if chunk.place is Place.FIRST) if self.is_remote else ()
        self._num_users.update(chunk.chunk_id for chunk in stay)
        try:
            leased = tuple(chunk for chunk in chunks if chunk.place is not Place.FIRST and self._adopt(chunk))
            slot_ids = self._show(leased) if leased else ()
        except BaseException:
            self._num_users.subtract(chunk.chunk_id for chunk in stay)
            raise
        if slot_ids is None:
            return None
        return Lease(leased, slot_ids, stay) if leased or stay else None

    def _show(self, chunks: tuple[WeightChunk, ...]) -> tuple[int, ...] | None:
        """Open slots, whose numbers are returned, or copies. None: homes can be computed on, and there is no slot."""
        if self.executor is None:  # the plan had never seen them used
            with suppress(OutOfMemoryError):
                self._ensure_executor()
        executor, entries = self.executor, None
        ids = tuple(chunk.chunk_id for chunk in chunks)
        if executor is not None and all(self._is_fresh(chunk) for chunk in chunks):
            entries = self._acquire(executor, ids)
        if executor is None or entries is None:
            if not self.is_remote:
                return None
            copies = [chunk.views_of(self._copy_of(chunk)) for chunk in chunks]
            for chunk, views in zip(chunks, copies, strict=True):
                chunk.open(views)
            return ()
        for chunk, entry in zip(chunks, entries, strict=True):
            if not entry.views:
                entry.views.update(enumerate(chunk.views_of(chunk.in_slot(executor.bytes_of(entry)))))
            self._slot_owners[entry.space.address] = chunk
            content = None
            if self._phase not in chunk.phases_checked and not chunk.is_written_unseen and not chunk.num_open:
                content = chunk.in_slot(executor.bytes_of(entry))
            chunk.open([entry.views[i] for i in range(len(chunk.views))], content)
        return ids

    def release(self, lease: Lease) -> None:
        self._num_users.subtract(chunk.chunk_id for chunk in lease.stay)
        for chunk in lease.chunks:
            if chunk.close():
                chunk.phases_checked.add(self._phase)
        executor = self.executor
        if executor is None or not lease.slot_ids:
            return
        executor.release(lease.slot_ids)
        for chunk in lease.chunks:
            if chunk.version != chunk.counter() and executor.drop(chunk.chunk_id):  # written, and gone home
                chunk.version = chunk.counter()

    def is_shown(self, parameter: nn.Parameter) -> bool:
        """Whether compute can read a parameter now, and as long as its module's lease lasts."""
        chunk = self._chunk_of.get(id(parameter))
        is_held = chunk is None or chunk.num_open > 0 or self._num_users[chunk.chunk_id] > 0
        return is_held and parameter.device.type == self._device.torch_device.type

    def borrow(self, parameters: Sequence[nn.Parameter]) -> tuple[tuple[int, ...], Callable[[], None]] | None:
        """Keep parameters where compute can read them, outside their own module's lease, until the function that is
        returned is called: chunks (whose numbers are returned) leased, what is away copied. None: they are there, and
        stay. Raises OutOfMemoryError."""
        chunks = dict.fromkeys(self._chunk_of[id(p)] for p in parameters if id(p) in self._chunk_of)
        wanted = tuple(c for c in chunks if not c.num_open and not self._num_users[c.chunk_id])
        lease = self.lease(wanted)
        shown: list[tuple[nn.Parameter, Tensor, int]] = []

        def give_back() -> None:
            for parameter, theirs, version in shown:
                if parameter._version != version:
                    theirs.copy_(parameter.data)
                parameter.data = theirs
            if lease is not None:
                self.release(lease)

        try:
            for parameter in parameters:
                if parameter.device.type == "cpu":  # memory of the user's own
                    theirs = parameter.data
                    parameter.data = theirs.to(self._device.torch_device)
                    shown.append((parameter, theirs, parameter._version))
        except BaseException:
            give_back()
            raise
        if lease is None and not shown:
            return None
        return tuple(chunk.chunk_id for chunk in wanted), give_back

    def _copy_of(self, chunk: WeightChunk) -> Tensor:
        """The chunk's bytes where compute can read them: the home itself if it can."""
        return self._copies.make(chunk) if self.is_remote and chunk.base.device.type == "cpu" else chunk.base

    def view(self, chunk: WeightChunk, make: Callable[[Tensor], Tensor]) -> Tensor:
        """`make` of the chunk's bytes, leased meanwhile. What it returns keeps the slot by its life."""
        executor = self.executor
        if chunk.place is Place.FIRST or chunk.is_elsewhere or executor is None or not self._is_fresh(chunk):
            return make(self._copy_of(chunk))
        entries = self._acquire(executor, (chunk.chunk_id,))
        if entries is None:
            return make(self._copy_of(chunk))
        (entry,) = entries
        del entries
        try:
            self._slot_owners[entry.space.address] = chunk
            return make(chunk.in_slot(executor.bytes_of(entry)))
        finally:
            del entry
            executor.release((chunk.chunk_id,))

    def _acquire(self, executor: Executor, ids: Sequence[int]) -> list[Residency] | None:
        """None: there is no room. Of the time, one part in twenty goes into looking in vain for dead cycles, and more
        only where there is no room for copies either."""
        start_s = perf_counter()
        may_collect = start_s >= self._collect_after_s
        if self.is_remote and not may_collect:
            copies_nbytes = sum(chunk.slot_nbytes for chunk in self.chunks if chunk.chunk_id in ids)
            may_collect = not self._ledger.can_take(self.first, copies_nbytes)
        try:
            return executor.acquire(ids, may_collect=may_collect)
        except (OutOfMemoryError, InterruptedPassError):
            self.num_unleased += 1
            if may_collect:
                now_s = perf_counter()
                self._collect_after_s = now_s + 20 * (now_s - start_s)
            return None

    def _adopt(self, chunk: WeightChunk) -> bool:
        return chunk.adopt(self._is_private)

    def _is_private(self, parameter: nn.Parameter) -> bool:
        """Whether only parameters of the model look at a parameter's storage, and none of them at its bytes."""
        storage = parameter.untyped_storage().data_ptr()
        plain = [p for p in self._parameters if type(p.data) is Tensor and p.layout is torch.strided]
        others = [p for p in plain if p is not parameter and p.untyped_storage().data_ptr() == storage]
        start, end = span_of(parameter)
        if any(low < end and start < high for low, high in map(span_of, others)):
            return False
        return num_holders(parameter) <= 1 + len(others)

    def _is_fresh(self, chunk: WeightChunk) -> bool:
        """Whether copies made since the last restart are those of today's home; old ones are dropped if they can be."""
        if chunk.version == chunk.counter():
            return True
        assert self.executor is not None
        if not self.executor.drop(chunk.chunk_id):
            return False
        chunk.version = chunk.counter()
        return True

    def find(self, tensor: Tensor) -> tuple[WeightChunk, int] | None:
        """The chunk whose bytes a tensor views, in a slot or at home, and where in them it begins."""
        address = tensor.untyped_storage().data_ptr()
        owner = self._slot_owners.get(address) or self._copies.owner(address)
        if owner is not None:
            start, end = span_of(tensor)
            start -= owner.residue
            return (owner, start) if start >= 0 and end - owner.residue <= owner.nbytes else None
        if self._num_moves_seen != self.homes.num_moves:
            self._index()
        for chunk in self._homes_at.get(address, ()):
            start, end = span_of(tensor)
            first = int(chunk.base.storage_offset())
            if first <= start and end <= first + chunk.nbytes:
                return chunk, start - first
        return None

    def _index(self) -> None:
        self._homes_at = {}
        for chunk in self.chunks:
            # The chunk holds this storage, so its address cannot come to mean another.
            self._homes_at.setdefault(chunk.base.untyped_storage().data_ptr(), []).append(chunk)
        self._num_moves_seen = self.homes.num_moves

    # -- the rest -----------------------------------------------------------------------------------------------------

    def stats(self) -> Mapping[str, float]:
        """The executors' counters, those of earlier plans included."""
        every = [*self._past_stats, *([self.executor.stats] if self.executor is not None else [])]
        total = dict.fromkeys(asdict(ExecutorStats()), 0.0)
        for stats in every:
            for name, value in asdict(stats).items():
                total[name] += value
        return total

    def close(self, tell: Callable[[int], None]) -> None:
        """Give the model its memory back. Blocks."""
        for chunk in self.chunks:
            chunk.end_leases()  # an interrupted pass has left them
        self.close_executor()
        self._copies.collect()
        self.kept_views.forget()
        self.homes.restore(tell)


def parameters_of(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module._parameters.values() if parameter is not None]


def _moments_of(model: nn.Module, own: Mapping[int, Sequence[WeightChunk]]) -> list[tuple[WeightChunk, ...]]:
    """For each module, the chunks that it and those around it need at once."""
    moments = {}
    for path, _ in model.named_modules():
        parts = path.split(".") if path else []
        around = [model.get_submodule(".".join(parts[:i])) for i in range(len(parts) + 1)]
        chunks = {chunk.chunk_id: chunk for module in around for chunk in own.get(id(module), ())}
        moments[tuple(chunks)] = tuple(chunks.values())
    return list(moments.values())
