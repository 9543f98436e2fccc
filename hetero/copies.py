"""Copies of chunks outside the ring, where compute can read them: for what gets no slot on a device that cannot read
homes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from torch import Tensor

from hetero.memory.budget import Ledger
from hetero.memory.device import ArenaLike, Device
from hetero.memory.kept import refill
from hetero.memory.residency import alias
from hetero.memory.weights import WeightChunk

COPIES = "copies outside the ring"


class Copies:
    """Owns the copies' memory: booked in `tier`, by `reserve`, which makes room, until the last alias has died."""

    def __init__(self, device: Device, ledger: Ledger, tier: str, reserve: Callable[[str, str, int], None]) -> None:
        self._device, self._ledger, self._tier, self._reserve = device, ledger, tier, reserve
        self._arenas: dict[int, tuple[WeightChunk, ArenaLike]] = {}  # by address
        self._dead: deque[int] = deque()

    @property
    def has_any(self) -> bool:
        self.collect()
        return bool(self._arenas)

    def owner(self, address: int) -> WeightChunk | None:
        """The chunk whose copy begins there."""
        found = self._arenas.get(address)
        return found[0] if found is not None else None

    def make(self, chunk: WeightChunk) -> Tensor:
        """The chunk's bytes as they are now. Blocks. Raises OutOfMemoryError."""
        self.collect()
        self._reserve(self._tier, COPIES, chunk.slot_nbytes)
        try:
            arena = self._device.allocate(chunk.slot_nbytes, name=chunk.name)
        except BaseException:
            self._ledger.give(self._tier, COPIES, chunk.slot_nbytes)
            raise
        self._arenas[arena.address] = chunk, arena
        on_death = partial(self._dead.append, arena.address)
        slot = alias(arena.address, chunk.slot_nbytes, self._device.torch_device, on_death, (arena.keeper,))
        where = arena.address + chunk.residue
        self._device.copy(where, chunk.base.data_ptr(), chunk.nbytes, to_device=True).synchronize()
        return chunk.in_slot(slot)

    def refresh(self) -> None:
        """Bring today's values into those that somebody keeps, Note [kept views]."""
        self.collect()
        for address, (chunk, _) in self._arenas.items():
            refill(chunk, address, self._device.torch_device)

    def collect(self) -> None:
        """Free what nobody looks at any more."""
        while self._dead:
            chunk, arena = self._arenas.pop(self._dead.popleft())
            arena.close()
            self._ledger.give(self._tier, COPIES, chunk.slot_nbytes)
