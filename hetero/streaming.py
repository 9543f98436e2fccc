"""The leases of a wrapped model's weights: shown where they are computed on, for as long as that takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hetero.copies import Copies
from hetero.io.engine import Engine
from hetero.io.errors import OutOfMemoryError
from hetero.io.scratch import ScratchStore
from hetero.memory.budget import Ledger
from hetero.memory.device import Device
from hetero.memory.executor import Executor
from hetero.memory.kept import KeptViews
from hetero.memory.pipeline import InterruptedPassError
from hetero.memory.schedule import Stay
from hetero.memory.states import Residency
from hetero.memory.weights import Place, WeightChunk, num_holders, span_of
from hetero.placing import Placing


class Lease(NamedTuple):
    """Chunks that are shown where they are computed on: from slots, whose numbers are `slot_ids`, or from copies.
    `residents` are at home there."""

    chunks: tuple[WeightChunk, ...]
    slot_ids: tuple[int, ...]
    residents: tuple[WeightChunk, ...]


class Streaming(Placing):
    """Leases of what `Placing` places. `reserve` books bytes of a tier for a holder, and makes room for them first."""

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
        super().__init__(model, chunks, device=device, engine=engine, store=store, ledger=ledger)
        self.num_unleased = 0
        self._collect_after_s = 0.0
        self._parameters = list(model.parameters())
        self._chunk_of = {id(view.parameter): chunk for chunk in chunks for view in chunk.views}
        self._slot_owners: dict[int, WeightChunk] = {}
        self._num_users: Counter[int] = Counter()  # of chunks that stay
        self._copies = Copies(device, ledger, self.first, reserve)
        self._homes_at: dict[int, list[WeightChunk]] = {}
        self._num_moves_seen = -1
        self._phase = ""  # the one that runs
        self.kept_views = KeptViews({chunk.chunk_id: chunk for chunk in chunks}, device.torch_device)

    def _opened(self, executor: Executor) -> None:
        self.kept_views.follow(executor)

    def _closed(self) -> None:
        self._slot_owners.clear()

    def _is_in_use(self, chunk: WeightChunk) -> bool:
        return super()._is_in_use(chunk) or self._num_users[chunk.chunk_id] > 0

    def make_room(self, nbytes: int) -> bool:
        self._copies.collect()
        return super().make_room(nbytes)

    def recover(self) -> None:
        self._num_users.clear()
        super().recover()

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

    def restart(self, stays: Sequence[Stay], phase: str = "") -> None:
        """A pass begins (its order and phase) or ends (nothing): before and after it homes are the only copies.

        Views of slots that somebody keeps get today's values when one begins.
        """
        self._phase = phase
        self._copies.collect()
        if phase:
            self.kept_views.refresh()
            self._copies.refresh()
        if self.executor is not None:
            self.executor.restart(stays)
            for chunk in self.streamed:
                chunk.version = chunk.counter()

    def lease(self, chunks: Sequence[WeightChunk]) -> Lease | None:
        """Show the chunks' parameters leased bytes until `release`. None: there is no room for all of them at once,
        so the module computes on the homes, which is right and slow; where it cannot, on copies, or OutOfMemoryError
        is raised."""
        residents = tuple(chunk for chunk in chunks if chunk.place is Place.FIRST) if self.is_remote else ()
        self._num_users.update(chunk.chunk_id for chunk in residents)
        try:
            leased = tuple(chunk for chunk in chunks if chunk.place is not Place.FIRST and self._adopt(chunk))
            slot_ids = self._show(leased) if leased else ()
        except BaseException:
            self._num_users.subtract(chunk.chunk_id for chunk in residents)
            raise
        if slot_ids is None:
            return None
        return Lease(leased, slot_ids, residents) if leased or residents else None

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
        self._num_users.subtract(chunk.chunk_id for chunk in lease.residents)
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

    def close(self, tell: Callable[[int], None]) -> None:
        """Give the model its memory back. Blocks."""
        for chunk in self.chunks:
            chunk.end_leases()  # an interrupted pass has left them
        self.close_executor()
        self._copies.collect()
        self.kept_views.forget()
        self.homes.restore(tell)
