"""Moving the homes of weight chunks between memory and the scratch file, booked in the ledger.

Note [homes that stay]
    A home that tensors outside the model look at (a kept state_dict, `p.detach()`, a numpy array) does not move, in
    memory or on disk. In memory, moving it would free nothing, so the ledger would lie, and whoever looks at it would
    see old values from then on; on disk its extent would be written again under his eyes. At the end, `restore` moves
    homes on disk all the same: what somebody still holds of one keeps the mapping and the values of that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from hetero.io.arena import round_up
from hetero.io.engine import Engine, Request
from hetero.io.operation import finish
from hetero.io.scratch import ScratchStore
from hetero.memory.device import ArenaLike, Device
from hetero.memory.ledger import Ledger
from hetero.memory.onlookers import Onlookers
from hetero.memory.residency import MappedFile, alias, nothing
from hetero.memory.weights import Place, WeightChunk

WEIGHTS = "weights"


class Homes:
    """Owns the memory of homes that were moved; a chunk that never moved stays in the model's own memory.

    `store` None: there is no disk tier. The engine, the device and the store are the caller's and outlive this. Not
    thread-safe; `move` blocks. A chunk's parameters show its home all along, so an error in the middle leaves it
    where it was.
    """

    def __init__(
        self,
        chunks: Sequence[WeightChunk],
        *,
        device: Device,
        engine: Engine,
        ledger: Ledger,
        store: ScratchStore | None,
        others: Iterable[Tensor] = (),
    ) -> None:
        """`others`: the model's tensors that are in no chunk; one storage may hold some of both."""
        self.chunks = chunks
        self._onlookers = Onlookers(chunks, others)
        self._device, self._engine, self._ledger, self._store = device, engine, ledger, store
        self._arenas: dict[int, ArenaLike] = {}
        self._map: MappedFile | None = None
        self.num_moves = 0
        for chunk in chunks:
            if store is not None:
                chunk.extent = store.allocate(chunk.slot_nbytes, holder=WEIGHTS)
            if device.has_gpu_tier and chunk.base.device.type == "cpu":
                chunk.place = Place.CPU
        if store is not None:
            self._map = MappedFile(store.path, store.nbytes)

    @property
    def has_disk(self) -> bool:
        return self._store is not None

    def tier_of(self, place: Place) -> str:
        """The ledger's name for a place."""
        if place is Place.FIRST:
            return "gpu" if self._device.has_gpu_tier else "cpu"
        return str(place.value)

    def is_watched(self, chunk: WeightChunk) -> bool:
        """Whether a home cannot move now, Note [homes that stay]."""
        return chunk.is_elsewhere or self._onlookers.is_watched(chunk)

    def book(self, chunk: WeightChunk) -> None:
        """Book a chunk where it is."""
        self._ledger.take(self.tier_of(chunk.place), WEIGHTS, chunk.nbytes)

    def move(self, chunk: WeightChunk, place: Place, *, is_booked: bool = True) -> None:
        """Bring a chunk's home to `place`. Blocks. Raises OutOfMemoryError and IOEngineError with nothing changed.

        No copy of the chunk may be in the making: the executor must have dropped it. `is_booked`: the ledger has it
        where it is now. A home that has to stay does, and nothing is changed, Note [homes that stay].
        """
        if chunk.place is place:
            return
        chunk.adopt()
        before = chunk.place
        if self.is_watched(chunk):
            return
        if place is not Place.DISK:
            self._ledger.take(self.tier_of(place), WEIGHTS, chunk.nbytes)
        try:
            base, arena = self._copy(chunk, place)
        except BaseException:
            if place is not Place.DISK:
                self._ledger.give(self.tier_of(place), WEIGHTS, chunk.nbytes)
            raise
        # Until the old one is closed one of the two is in the books, whatever call an interrupt hits.
        old_arena = self._arenas[chunk.chunk_id] if chunk.chunk_id in self._arenas else None  # noqa: SIM401
        if arena is not None:
            self._arenas[chunk.chunk_id] = arena
        chunk.rehome(base, place)
        self.num_moves += 1
        if old_arena is not None:
            old_arena.close()
            if arena is None:
                del self._arenas[chunk.chunk_id]
        if before is not Place.DISK and is_booked:
            self._ledger.give(self.tier_of(before), WEIGHTS, chunk.nbytes)

    def _copy(self, chunk: WeightChunk, place: Place) -> tuple[Tensor, ArenaLike | None]:
        """The chunk's bytes at a new place, and the arena they are in, if it is one of ours."""
        if place is Place.DISK:
            return self._write(chunk), None
        if place is Place.FIRST and self._device.has_gpu_tier:
            arena = self._device.allocate(chunk.slot_nbytes, name=chunk.name)
            try:
                where = arena.address + chunk.residue, chunk.nbytes
                base = alias(*where, self._device.torch_device, nothing, (arena.keeper,))
                host = chunk.base if chunk.place is Place.CPU else self._read(chunk)
                self._device.copy(base.data_ptr(), host.data_ptr(), chunk.nbytes, to_device=True).synchronize()
            except BaseException:
                arena.close()
                raise
            return base, arena
        if chunk.place is Place.DISK:
            return self._read(chunk), None
        base = self._memory(chunk)
        base.copy_(chunk.base)
        return base, None

    def _memory(self, chunk: WeightChunk) -> Tensor:
        """RAM of torch's own with the chunk's address modulo 64."""
        with torch.inference_mode(False):
            nbytes = round_up(chunk.residue + chunk.nbytes + 63, 64)  # torch.save wants whole elements of any dtype
            whole = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            start = (chunk.residue - whole.data_ptr()) % 64
            # Not a slice, which would count as one more that looks at the storage.
            empty = torch.empty(0, dtype=torch.uint8, device="cpu")
            return empty.set_(whole.untyped_storage(), start, (chunk.nbytes,), (1,))

    def _read(self, chunk: WeightChunk) -> Tensor:
        assert self._store is not None and self._store.file is not None and chunk.extent is not None
        base = self._memory(chunk)
        offset = chunk.extent.offset + chunk.residue
        self._transfer(Request(self._store.file, offset, chunk.nbytes, base.data_ptr()), base)
        return base

    def _write(self, chunk: WeightChunk) -> Tensor:
        assert self._store is not None and self._store.file is not None and chunk.extent is not None
        assert self._map is not None
        source = chunk.base if chunk.base.device.type == "cpu" else chunk.base.cpu()
        offset = chunk.extent.offset + chunk.residue
        self._transfer(Request(self._store.file, offset, chunk.nbytes, source.data_ptr(), write=True), source)
        return alias(self._map.address + offset, chunk.nbytes, torch.device("cpu"), nothing, (self._map,))

    def _transfer(self, request: Request, memory: Tensor) -> None:
        try:
            finish(self._engine.submit([request]), memory=memory)
        except Exception:
            raise
        except BaseException:
            self._engine.quiesce()  # an interrupt may have hit before we had the future, and the memory goes now
            raise

    def restore(self, progress: Callable[[int], None] | None = None) -> None:
        """Give every chunk memory of the model's own again, whatever the budgets: the wrap ends.

        A chunk whose read fails stays where it is. The first error is raised when all others are restored.
        """
        first_error: Exception | None = None
        done_nbytes = 0
        for chunk in self.chunks:
            done_nbytes += chunk.nbytes
            try:
                if chunk.home:
                    self._restore(chunk)
                    chunk.let_go()
                if progress is not None:
                    progress(done_nbytes)
            except Exception as error:
                first_error = first_error or error
        self._map = None
        if first_error is not None:
            raise first_error

    def _restore(self, chunk: WeightChunk) -> None:
        chunk.adopt()
        if chunk.is_elsewhere:
            return
        if chunk.place is Place.DISK:
            base = self._read(chunk)
        elif chunk.place is Place.FIRST and chunk.chunk_id in self._arenas:
            base = self._memory(chunk)
            base.copy_(chunk.base)
            self._ledger.give(self.tier_of(chunk.place), WEIGHTS, chunk.nbytes)
        else:
            return
        chunk.rehome(base, Place.FIRST)
        arena = self._arenas.pop(chunk.chunk_id, None)
        if arena is not None:
            arena.close()
