"""The states of a residency: one chunk in one slot of the first tier, from the first byte to the last alias."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch

from hetero.memory.chunk import Chunk
from hetero.memory.ring import Space

if TYPE_CHECKING:
    from hetero.memory.device import Event
    from hetero.memory.transfer import ChunkRead


class State(Enum):
    """Who may touch the slot's bytes."""

    FILLING = "filling"
    """A read or a copy writes them. Leasable once `ready_event` exists: compute waits for it."""
    READY = "ready"
    """Valid. Leases may be open."""
    FAILED = "failed"
    """The transfer failed; never leased, the error is raised to whoever asks for the chunk."""
    RETIRED = "retired"
    """No lease will be given any more; tensors may still alias the bytes."""
    FREE = "free"
    """Given back to the ring."""


_NEXT = {
    State.FILLING: {State.READY, State.FAILED, State.RETIRED},
    State.READY: {State.RETIRED},
    State.FAILED: {State.RETIRED},
    State.RETIRED: {State.FREE},
    State.FREE: set(),
}

RESIDENT = -1  # the index of a residency that is not in the schedule


class Residency:
    """A chunk's stay in a slot. The executor owns it and changes it under its lock only.

    `index` is the place in the schedule (-1: static resident), `fence` the event after which nothing computes on the
    bytes any more, `ready_event` the copy that compute has to wait for (None when the host already waited).
    """

    __slots__ = (
        "chunk", "error", "fence", "index", "is_abandoned", "is_outlived", "leases", "num_uses", "read", "ready_event",
        "space", "state", "tensor", "uses", "views",
    )  # fmt: skip

    def __init__(self, chunk: Chunk, space: Space, index: int, num_uses: int) -> None:
        self.chunk = chunk
        self.space = space
        self.index = index
        self.num_uses = num_uses
        self.uses = 0
        self.leases = 0
        self.state = State.FILLING
        self.read: ChunkRead | None = None
        self.ready_event: Event | None = None
        self.fence: Event | None = None
        self.error: BaseException | None = None
        self.is_abandoned = False
        self.is_outlived = False  # by a tensor that somebody else keeps
        self.tensor: torch.Tensor | None = None
        self.views: dict[object, torch.Tensor] = {}

    @classmethod
    def resident(cls, chunk: Chunk, space: Space) -> Residency:
        """A static resident: valid for the whole run, never retired."""
        entry = cls(chunk, space, index=RESIDENT, num_uses=0)
        entry._go(State.READY)
        return entry

    @property
    def is_resident(self) -> bool:
        return self.index == RESIDENT

    def filled(self, error: BaseException | None) -> None:
        self.error = error
        self._go(State.READY if error is None else State.FAILED)

    def retire(self) -> None:
        assert self.leases == 0
        self._go(State.RETIRED)

    def free(self) -> None:
        self._go(State.FREE)

    def drop_views(self) -> None:
        """Forget our own aliases; the finalizer fires when those were the last."""
        self.views.clear()
        self.tensor = None

    def _go(self, state: State) -> None:
        assert state in _NEXT[self.state], f"{self.chunk.name}: {self.state.value} -> {state.value}"
        self.state = state


class Staged:
    """A chunk on its way from disk through the cpu tier's ring to the gpu tier."""

    __slots__ = ("chunk", "error", "index", "is_read", "read", "space")

    def __init__(self, chunk: Chunk, index: int, space: Space) -> None:
        self.chunk = chunk
        self.index = index
        self.space = space
        self.read: ChunkRead | None = None
        self.is_read = False
        self.error: BaseException | None = None


@dataclass(slots=True)
class ExecutorStats:
    """Counters since the start. Bytes are those of chunks; `wait_s` is the model's thread waiting for leases."""

    num_leases: int = 0
    num_reads: int = 0
    num_copies: int = 0
    num_demands: int = 0
    num_abandoned: int = 0
    num_collections: int = 0
    read_nbytes: int = 0
    copied_nbytes: int = 0
    wait_s: float = 0.0
