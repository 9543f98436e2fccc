"""CUDA and XPU: copies on a stream per direction, completions by a watcher thread, page-locked host memory.

torch's two device modules (`torch.cuda`, `torch.xpu`) are used through what they share: `Stream`, `Event`, `stream`,
`current_stream`, `mem_get_info`, `synchronize`. A CUDA event can block without spinning; the generic `torch.Event`
cannot, and the two kinds must not be mixed.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hetero.io.arena import Arena
from hetero.io.errors import OutOfMemoryError
from hetero.memory.device import ArenaLike, Event, LinkInfo, Range
from hetero.memory.residency import alias
from hetero.memory.sizes import format_size

logger = logging.getLogger("hetero.memory")

OnDone = Callable[[BaseException | None], None]
_HOST = torch.device("cpu")
_REGISTER_PORTABLE = 1  # page-locked for every device, whichever is the calling thread's current one


class _CopyStream:
    """One direction: a stream, and a thread that tells when its copies have ended.

    The stream is waited for through the event each copy records on it: by the compute stream (`wait`), by the watcher
    thread (`on_done`) and by hosts that synchronise. It waits itself for the events given to `copy`.
    """

    def __init__(self, runtime: Any, torch_device: torch.device, name: str) -> None:
        self._runtime = runtime
        self._torch_device = torch_device
        self._stream = runtime.Stream(torch_device)
        self._lock = threading.Lock()  # copy and event are queued as one
        self._issued: queue.SimpleQueue[tuple[Event, OnDone] | None] = queue.SimpleQueue()
        self._watcher = threading.Thread(target=self._watch, name=f"hetero-copy-{name}", daemon=True)
        self._watcher.start()

    def copy(self, dst: torch.Tensor, src: torch.Tensor, after: Sequence[Any], on_done: OnDone | None) -> Event:
        with self._lock:
            for event in after:
                self._stream.wait_event(event)
            with self._runtime.stream(self._stream):
                dst.copy_(src, non_blocking=True)
            event = _new_event(self._runtime, self._torch_device)
            event.record(self._stream)
            if on_done is not None:
                self._issued.put((event, on_done))
        typed: Event = event
        return typed

    def synchronize(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        self._issued.put(None)
        self._watcher.join()

    def _watch(self) -> None:
        while (issued := self._issued.get()) is not None:
            event, on_done = issued
            error: BaseException | None = None
            try:
                event.synchronize()
            except BaseException as caught:  # the device is lost; whoever waits for the copy must hear of it
                error = caught
            try:
                on_done(error)
            except Exception:
                logger.exception("a completion callback failed")
            del issued, event, on_done


class _DeviceArena:
    """One tensor's worth of device memory, held until closed."""

    def __init__(self, tensor: torch.Tensor, device: AcceleratorDevice) -> None:
        self.address, self.nbytes = tensor.data_ptr(), tensor.numel()
        self._tensor: torch.Tensor | None = tensor
        self._device = device

    @property
    def keeper(self) -> object:
        return self._tensor

    def close(self) -> None:
        if self._tensor is not None:
            # torch knows of no use on our streams, so nothing may be running when it gets the memory back.
            self._device.synchronize()
            self._tensor = None
            torch.accelerator.empty_cache()


class _LockedArena:
    """Host memory that the driver has page-locked, until closed."""

    def __init__(self, arena: Arena, device: AcceleratorDevice, unlock: Callable[[int], object]) -> None:
        self.address, self.nbytes = arena.address, arena.nbytes
        self._arena: Arena | None = arena
        self._device = device
        self._unlock = unlock

    @property
    def keeper(self) -> object:
        return self._arena.keeper if self._arena is not None else None

    def close(self) -> None:
        if self._arena is not None:
            self._device.synchronize()
            self._unlock(self.address)
            self._arena.close()
            self._arena = None


class AcceleratorDevice:
    """`Device` on one CUDA or XPU device. Owns two streams and two watcher threads, which `close` ends.

    Compute is whatever the calling thread's current stream is. Device arenas are torch allocations, which torch rounds
    up to at most 2 MiB more (20 MiB for one of 1 to 10 MiB). `runtime` stands in for the torch module in tests.
    """

    has_gpu_tier = True

    def __init__(self, torch_device: torch.device, *, runtime: Any = None) -> None:
        self.torch_device = torch_device
        self.name = str(torch_device)
        self._runtime = runtime if runtime is not None else torch.get_device_module(torch_device)
        self._streams = {
            True: _CopyStream(self._runtime, torch_device, "to-device"),
            False: _CopyStream(self._runtime, torch_device, "from-device"),
        }
        self._has_warned = False
        self._is_closed = False

    def allocate(self, nbytes: int, *, name: str) -> ArenaLike:
        try:
            tensor = torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
        except torch.OutOfMemoryError as error:
            free, total = self.memory_info()
            raise OutOfMemoryError(
                f"{self.name} has {format_size(free)} of {format_size(total)} free; {name!r} asks for "
                f"{format_size(nbytes)}. Ask for less gpu_memory, or end other programs on it",
                tier="gpu",
                requested_nbytes=nbytes,
                free_nbytes=free,
            ) from error
        # The memory may be recycled from a tensor that queued work still uses; our copies run on other streams.
        self.synchronize()
        return _DeviceArena(tensor, self)

    def allocate_host(self, nbytes: int, *, name: str) -> ArenaLike:
        arena = Arena(nbytes, name=name)
        if self.torch_device.type != "cuda":
            return arena
        cudart = self._runtime.cudart()
        # Registered, not from torch's pinned allocator: that rounds every block up to a power of two.
        code = int(cudart.cudaHostRegister(arena.address, arena.nbytes, _REGISTER_PORTABLE))
        if code == 0:
            return _LockedArena(arena, self, cudart.cudaHostUnregister)
        self._clear_error()
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "cannot page-lock %s for %r (CUDA error %d): copies to and from %s will be slower. Raise the limit on "
                "locked memory (ulimit -l), or lower cpu_memory",
                format_size(arena.nbytes),
                name,
                code,
                self.name,
            )
        return arena

    def copy(
        self,
        dst: int,
        src: int,
        nbytes: int,
        *,
        to_device: bool,
        after: Sequence[Event] = (),
        on_done: OnDone | None = None,
    ) -> Event:
        dst_device, src_device = (self.torch_device, _HOST) if to_device else (_HOST, self.torch_device)
        # Aliases of addresses, which own nothing: they may die before the copy has ended.
        dst_tensor = alias(dst, nbytes, dst_device, _nothing)
        src_tensor = alias(src, nbytes, src_device, _nothing)
        return self._streams[to_device].copy(dst_tensor, src_tensor, after, on_done)

    def adopt(self, where: Range) -> None:
        return

    def record(self, uses: Sequence[Range] = ()) -> Event:
        event: Event = _new_event(self._runtime, self.torch_device)
        self._runtime.current_stream(self.torch_device).record_event(event)
        return event

    def wait(self, event: Event) -> None:
        self._runtime.current_stream(self.torch_device).wait_event(event)

    def retire(self, address: int, nbytes: int) -> None:
        return

    def memory_info(self) -> tuple[int, int]:
        free, total = self._runtime.mem_get_info(self.torch_device)
        return int(free), int(total)

    def link_info(self) -> LinkInfo:
        return LinkInfo()

    def synchronize(self) -> None:
        self._runtime.synchronize(self.torch_device)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self.synchronize()
        finally:
            for stream in self._streams.values():
                stream.close()

    def _clear_error(self) -> None:
        """Make the runtime forget a failed call, which it would report at the next kernel launch as that kernel's.

        torch reads and clears the last error after each launch, so a throwaway kernel takes the blame.
        """
        try:
            torch.ones(1, device=self.torch_device).add_(1)
            self.synchronize()
        except RuntimeError as error:
            logger.debug("cleared: %s", error)


def _new_event(runtime: Any, torch_device: torch.device) -> Any:
    if torch_device.type == "cuda":
        return runtime.Event(blocking=True)  # sleep while waiting; the default spins on a core
    return runtime.Event()


def _nothing() -> None:
    """An alias for one copy ends with it; nobody keeps count."""
