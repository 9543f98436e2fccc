"""Tensors that autograd saved, where there is room for them: first tier, cpu, disk.

Note [last saved, first needed]
    Backward asks for them in the reverse order of saving. So when room is short the oldest leaves first, and when one
    is asked for, those saved before it are fetched, as far as there is room.

Note [on the move]
    A storage that leaves keeps its memory until its bytes have arrived, and one that comes back its old place: both are
    booked meanwhile. At most `WINDOW_NBYTES` are on their way out; whoever sends more waits for the first.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Literal, Protocol

import torch
from torch import Tensor

from hetero.io.engine import Engine, Request
from hetero.io.errors import IOEngineError
from hetero.io.extent import Extent
from hetero.io.operation import finish, timed_out
from hetero.io.scratch import ScratchStore
from hetero.memory.device import Device, Event
from hetero.memory.ledger import Ledger
from hetero.memory.weights import span_of

Policy = Literal["keep", "cpu", "disk", "auto"]
ACTIVATIONS = "activations"
LARGE_NBYTES = 64 << 10
"""What is smaller leaves only when room is short: a request costs more than it frees."""
WINDOW_NBYTES = 64 << 20
"""At most so much is on its way out, and so much on its way back, at one time."""


class _Version(Protocol):
    def check(self) -> None: ...


class _Death(weakref.ref["Activation"]):
    """An activation is gone. From there to the store's deque all is C code: a KeyboardInterrupt has no line of Python
    to hit, where it would be printed, forgotten, and the death with it."""

    __slots__ = ("memory",)
    memory: Memory


class Memory:
    """The bytes of one storage that autograd saved, however many saved tensors look at it.

    `tier` is where they are for good; `incoming` the place they are on their way to: a host copy with its event, an
    extent with its write, or first-tier memory with its copy or read.
    """

    __slots__ = (
        "_dense", "_geometries", "arrival", "deaths", "extent", "incoming", "key", "nbytes", "target", "tensor", "tier",
    )  # fmt: skip

    def __init__(self, tensor: Tensor, key: int, tier: str) -> None:
        self.tensor: Tensor | None = tensor
        self.key, self.nbytes, self.tier = key, tensor.numel(), tier
        self._geometries: set[tuple[object, ...]] = set()
        self._dense = 0, 0
        self.deaths: dict[int, _Death] = {}  # of the activations that look at it, by id: a dead one has no hash
        self.extent: Extent | None = None
        self.target: str | None = None
        self.incoming: Tensor | None = None
        self.arrival: Event | Future[int] | None = None

    def note(self, tensor: Tensor) -> None:
        """Remember which bytes a saved tensor looks at."""
        start, end = span_of(tensor)
        if end - start == tensor.numel() * tensor.element_size() and end - start > self._dense[1] - self._dense[0]:
            self._dense = start, end
        self._geometries.add((start, tensor.shape, tensor.stride(), tensor.dtype))

    def covers(self, tensor: Tensor) -> bool:
        """Whether a tensor looks at nothing but bytes that were saved before: those do not change, or torch would
        refuse the backward. Others of the storage may: a recurrent cell computes its gates in place, one by one."""
        start, end = span_of(tensor)
        if self._dense[0] <= start and end <= self._dense[1]:
            return True
        return (start, tensor.shape, tensor.stride(), tensor.dtype) in self._geometries


class Activation:
    """One saved tensor: a view of a `Memory`."""

    __slots__ = ("__weakref__", "_dtype", "_memory", "_offset", "_shape", "_store", "_stride", "_version")

    def __init__(self, store: ActivationStore, memory: Memory, tensor: Tensor, version: _Version) -> None:
        self._store, self._memory, self._version = store, memory, version
        self._shape, self._stride, self._dtype = tensor.shape, tensor.stride(), tensor.dtype
        self._offset = tensor.storage_offset()
        death = _Death(self, store.dropped.append)  # it may come anywhere, even inside a lock of ours
        death.memory = memory
        memory.deaths[id(death)] = death

    def unpack(self) -> Tensor:
        """The tensor, in first-tier memory. Blocks while its bytes come back."""
        self._version.check()
        base = self._store.fetch(self._memory)
        empty = torch.empty(0, dtype=self._dtype, device=base.device)
        return empty.set_(base.untyped_storage(), self._offset, self._shape, self._stride)


class ActivationStore:
    """Counts what autograd saved, and moves it. Used by one thread at a time.

    `policy`: "keep" never moves anything; "cpu" (behind a gpu tier) and "disk" move what is large as soon as it is
    saved, and else, as "auto" does, what there is no room for. `reserve(tier, holder, nbytes)` books in the ledger, and
    makes room or raises OutOfMemoryError. Engine, device, ledger and store are the caller's and outlive this.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        device: Device,
        engine: Engine,
        ledger: Ledger,
        store: ScratchStore | None,
        reserve: Callable[[str, str, int], None],
    ) -> None:
        self.policy = policy
        self.dropped: deque[_Death] = deque()
        self.out_nbytes = 0
        self.back_nbytes = 0
        self._device, self._engine, self._ledger, self._store = device, engine, ledger, store
        self._reserve = reserve
        self._first = "gpu" if device.has_gpu_tier else "cpu"
        self.leaves_at_once = policy == "disk" or (policy == "cpu" and device.has_gpu_tier)
        self._is_closed = False
        self._memories: dict[int, Memory] = {}  # by id, oldest first
        self._by_key: dict[int, Memory] = {}  # by storage, while it is in the first tier
        self._leaving: deque[Memory] = deque()
        self._away: set[int] = set()  # ids of those that are not in the first tier

    @property
    def nbytes(self) -> int:
        """Bytes of the first tier that saved tensors hold."""
        return self._ledger.held(self._first, ACTIVATIONS)

    def add(self, tensor: Tensor, version: _Version) -> Activation:
        """Count a saved tensor. Raises OutOfMemoryError when there is no room for it anywhere."""
        self.collect()
        storage = tensor.untyped_storage()
        memory = self._by_key.get(storage._cdata)
        if memory is None or (memory.target is not None and not memory.covers(tensor)):
            base = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            base.set_(storage, 0, (storage.nbytes(),), (1,))
            self._reserve(self._first, ACTIVATIONS, storage.nbytes())
            # Its storage lives as long as the entry, so the key cannot come to mean another.
            memory = Memory(base, storage._cdata, self._first)
            self._memories[id(memory)] = self._by_key[memory.key] = memory
        activation = Activation(self, memory, tensor, version)
        if memory.target is None:
            memory.note(tensor)
        if self.leaves_at_once and memory.nbytes >= LARGE_NBYTES:
            self._send(memory)
        return activation

    def make_room(self, nbytes: int) -> bool:
        """Free `nbytes` of the first tier, oldest first. False: there was not so much that may leave."""
        self.collect()
        freed = 0
        for memory in list(self._memories.values()):
            if freed >= nbytes:
                break
            if memory.target == self._first:  # fetched ahead of need: it goes again
                self._settle(memory)
            if memory.tier == self._first and (memory.target is not None or self._send(memory)):
                freed += memory.nbytes
        while self._leaving:
            self._settle(self._leaving[0])
        return freed >= nbytes

    def fetch(self, memory: Memory) -> Tensor:
        """The bytes in first-tier memory; starts bringing back those that will be needed next."""
        self.collect()
        if memory.tier != self._first and memory.target is None:
            self._reserve(self._first, ACTIVATIONS, memory.nbytes)
            self._bring(memory)
        if memory.target is not None and memory.tier != self._first:
            self._settle(memory)
        self._prefetch(memory)
        assert memory.tensor is not None
        return memory.tensor

    def collect(self) -> None:
        """Forget what autograd has let go of."""
        while self.dropped:
            death = self.dropped[0]  # until all is done: an interrupt may come, and then it is done again
            death.memory.deaths.pop(id(death), None)
            if not death.memory.deaths:
                self._forget(death.memory)
            self.dropped.popleft()

    def recover(self) -> None:
        """After an interrupt, with nothing in flight any more: what was on the move is where it was."""
        self._leaving.clear()
        self._away = {key for key, memory in self._memories.items() if memory.tier != self._first}
        for memory in self._memories.values():
            if memory.target is not None:
                memory.target = memory.incoming = memory.arrival = None
            if memory.extent is not None and memory.tier != "disk":
                self._free_extent(memory)
        known = self._memories
        self._by_key = {k: m for k, m in self._by_key.items() if m.tier == self._first and id(m) in known}
        self.collect()
        for tier in self._ledger.tiers():
            held = sum(memory.nbytes for memory in self._memories.values() if memory.tier == tier)
            self._ledger.correct(tier, ACTIVATIONS, held if tier != "disk" else 0)

    def close(self) -> None:
        """Bring everything back that somebody may still need, whatever the budgets, and forget the rest. Blocks.

        What cannot be read is lost, and the first error is raised when all else is back.
        """
        self.collect()
        for tier in self._ledger.tiers():
            self._ledger.give(tier, ACTIVATIONS, self._ledger.held(tier, ACTIVATIONS))
        self._is_closed = True
        first_error: IOEngineError | None = None
        for memory in list(self._memories.values()):
            try:
                self._settle(memory)
                if memory.tier != self._first:
                    self._bring(memory)
                    self._settle(memory)
            except IOEngineError as error:
                if memory.tier != self._first:
                    first_error = first_error or error
        self._memories.clear()
        self._away.clear()
        self._by_key.clear()
        if first_error is not None:
            raise first_error

    # -- moving -------------------------------------------------------------------------------------------------------

    def _send(self, memory: Memory) -> bool:
        """Start to move a storage out of the first tier. False: there is nowhere to go."""
        if self.policy == "keep" or memory.target is not None or memory.tier != self._first:
            return False
        assert memory.tensor is not None
        goes_to_cpu = self._first == "gpu" and self.policy != "disk" and self._ledger.can_take("cpu", memory.nbytes)
        if goes_to_cpu:
            self._ledger.take("cpu", ACTIVATIONS, memory.nbytes)
            memory.incoming = self._host(memory.nbytes)
            memory.arrival = self._to_host(memory, memory.incoming)
            memory.target = "cpu"
        elif self._store is not None and self._store.can_allocate(memory.nbytes):
            memory.extent = self._store.allocate(memory.nbytes, holder=ACTIVATIONS)
            memory.arrival = self._to_disk(memory)
            memory.target = "disk"
        else:
            return False
        self.out_nbytes += memory.nbytes
        self._leaving.append(memory)
        while sum(m.nbytes for m in self._leaving) > WINDOW_NBYTES:
            self._settle(self._leaving[0])
        return True

    def _to_host(self, memory: Memory, host: Tensor) -> Event:
        assert memory.tensor is not None
        where = memory.tensor.data_ptr()
        self._device.adopt((where, memory.nbytes))
        return self._copy(host.data_ptr(), where, memory.nbytes, to_device=False, after=(self._device.record(),))

    def _to_disk(self, memory: Memory) -> Future[int]:
        assert self._store is not None and self._store.file is not None
        assert memory.extent is not None and memory.tensor is not None
        source = memory.tensor
        if self._first == "gpu":
            source = memory.incoming = self._host(memory.nbytes)  # passes through; smaller than a window, so not booked
            self._to_host(memory, source).synchronize()
        request = Request(self._store.file, memory.extent.offset, memory.nbytes, source.data_ptr(), write=True)
        return self._engine.submit([request])[0]

    def _bring(self, memory: Memory) -> None:
        """Start to move a storage back; the first tier's bytes are booked already."""
        try:
            if memory.tier == "disk":
                assert self._store is not None and self._store.file is not None and memory.extent is not None
                memory.incoming = self._host(memory.nbytes)
                where = self._store.file, memory.extent.offset, memory.nbytes, memory.incoming.data_ptr()
                memory.arrival = self._engine.submit([Request(*where)])[0]
            else:
                assert memory.tensor is not None
                memory.incoming, memory.arrival = self._to_first(memory.tensor)
        except BaseException:
            self._give(self._first, memory.nbytes)
            raise
        memory.target = self._first
        self.back_nbytes += memory.nbytes

    def _to_first(self, host: Tensor) -> tuple[Tensor, Event]:
        base = torch.empty(host.numel(), dtype=torch.uint8, device=self._device.torch_device)
        self._device.adopt((base.data_ptr(), base.numel()))
        # The device's allocator may have given memory that compute still reads.
        after = (self._device.record(),)
        return base, self._copy(base.data_ptr(), host.data_ptr(), host.numel(), to_device=True, after=after)

    def _copy(self, dst: int, src: int, nbytes: int, *, to_device: bool, after: Sequence[Event] = ()) -> Event:
        try:
            return self._device.copy(dst, src, nbytes, to_device=to_device, after=after)
        except BaseException:
            self._device.synchronize()  # an interrupt may have come when it was issued, and the memory goes now
            raise

    def _prefetch(self, memory: Memory) -> None:
        if not self._away:
            return
        room = WINDOW_NBYTES
        older = list(self._memories.values())
        for other in reversed(older[: next((i for i, m in enumerate(older) if m is memory), 0)]):
            if other.tier == self._first:
                continue
            room -= other.nbytes
            if room < 0:
                return
            if other.target is None:
                if not self._ledger.can_take(self._first, other.nbytes):
                    return
                self._ledger.take(self._first, ACTIVATIONS, other.nbytes)
                self._bring(other)

    def _settle(self, memory: Memory) -> None:
        """Wait until a storage on the move has arrived, and let go of its old place."""
        arrival, target, before = memory.arrival, memory.target, memory.tier
        if target is None:
            return
        if memory in self._leaving:
            self._leaving.remove(memory)
        if isinstance(arrival, Future):
            try:
                finish([arrival], memory=(memory.tensor, memory.incoming))
            except BaseException:
                self._stay(memory, is_stuck=timed_out(arrival))
                raise
            arrival = None
            if target == "gpu":
                host = memory.incoming
                assert host is not None
                memory.incoming, arrival = self._to_first(host)
        if arrival is not None:
            arrival.synchronize()
        # An interrupt comes at a call, so none falls between these lines.
        memory.tensor = memory.incoming if target != "disk" else None
        memory.tier, memory.target, memory.incoming, memory.arrival = target, None, None, None
        self._note_tier(memory)
        if before == "disk":
            self._free_extent(memory)
        else:
            self._give(before, memory.nbytes)
        if self._by_key.get(memory.key) is memory:
            del self._by_key[memory.key]

    def _stay(self, memory: Memory, *, is_stuck: bool) -> None:
        """A move failed: the bytes are where they were. `is_stuck`: the kernel may still write to the extent."""
        if memory.target == "disk":
            if is_stuck:
                memory.extent = None
            else:
                self._free_extent(memory)
        elif memory.target is not None:
            self._give(memory.target, memory.nbytes)
        memory.target = memory.incoming = memory.arrival = None

    def _forget(self, memory: Memory) -> None:
        if self._memories.pop(id(memory), None) is None:
            return
        if memory.target is not None:
            with suppress(IOEngineError, CancelledError):  # nobody wants the bytes any more
                self._settle(memory)  # but the kernel or the link may still use their memory
        if self._by_key.get(memory.key) is memory:
            del self._by_key[memory.key]
        if memory.tier == "disk":
            self._free_extent(memory)
        else:
            self._give(memory.tier, memory.nbytes)
        self._away.discard(id(memory))
        memory.tensor = None

    def _note_tier(self, memory: Memory) -> None:
        if memory.tier == self._first:
            self._away.discard(id(memory))
        else:
            self._away.add(id(memory))

    def _free_extent(self, memory: Memory) -> None:
        extent, memory.extent = memory.extent, None  # first: after an interrupt it must not be freed again
        assert self._store is not None and extent is not None
        self._store.free(extent)

    def _give(self, tier: str, nbytes: int) -> None:
        if not self._is_closed:  # then nothing is booked any more
            self._ledger.give(tier, ACTIVATIONS, nbytes)

    def _host(self, nbytes: int) -> Tensor:
        is_pinned = self._device.torch_device.type == "cuda"
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
