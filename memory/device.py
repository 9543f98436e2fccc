"""One protocol for what computes and copies: CUDA and XPU, the CPU, and the emulated GPU.

Note [who records, who waits]
    A copy queue per direction runs its copies first in, first out, beside one compute queue.
    - before a copy writes where compute has read: the executor `record`s after the last use and passes that event in
      `after`; the copy queue waits for it.
    - before compute reads what a copy writes: `copy` returns the event; the executor passes it to `wait`, and the
      compute queue waits (on the emulated device the calling thread does).
    - before a file is read into memory that a copy reads from: `on_done` of that copy; the host waits.
    - before a slot is poisoned (`retire`): its last event has passed (`query`); the executor asks.
    Nothing else is ordered, and there is no global synchronisation outside `synchronize` and `close`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hetero.io.arena import Arena
from hetero.io.errors import ConfigError, UnsupportedError
from hetero.memory.detect import detect_cpu

Range = tuple[int, int]
"""(address, nbytes)"""

POISON = 0xFF  # as every byte: NaN in every float format, -1 in signed integers


class Event(Protocol):
    """A point in a queue's work."""

    def query(self) -> bool:
        """Say whether the queue has passed it. Never blocks."""

    def synchronize(self) -> None:
        """Block the calling thread until the queue has passed it. Raises what the work before it raised."""


class ArenaLike(Protocol):
    """Memory of one tier; whoever allocated it closes it, after every copy over it has ended."""

    address: int
    nbytes: int

    @property
    def keeper(self) -> object:
        """What an alias holds, so that the memory outlives `close` for as long as anybody can see it."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class LinkInfo:
    """A copy of n bytes takes `latency_s + n / bandwidth_bytes_per_s`. None: the device does not know; measure it."""

    bandwidth_bytes_per_s: float | None = None
    latency_s: float | None = None


class Device(Protocol):
    """Where a model computes. Every method may be called from any thread; none but those that say so blocks."""

    name: str
    torch_device: torch.device
    has_gpu_tier: bool

    def allocate(self, nbytes: int, *, name: str) -> ArenaLike:
        """Allocate memory of the gpu tier, once and for long. Blocks. Raises OutOfMemoryError; UnsupportedError when
        there is no such tier."""

    def allocate_host(self, nbytes: int, *, name: str) -> ArenaLike:
        """Allocate RAM that copies to and from the device are fast with. Blocks while its pages are touched."""

    def copy(
        self,
        dst: int,
        src: int,
        nbytes: int,
        *,
        to_device: bool,
        after: Sequence[Event] = (),
        on_done: Callable[[BaseException | None], None] | None = None,
    ) -> Event:
        """Queue a copy between addresses of the two tiers; it starts after the earlier copies of its direction and
        every event in `after`. Both ranges stay the caller's and valid until it ends: then `on_done(error)` runs once,
        on a thread of the device, never inside this call."""

    def adopt(self, where: Range) -> None:
        """Say that the next copy's device side is memory that torch allocated, which `allocate` knows nothing of."""

    def record(self, uses: Sequence[Range] = ()) -> Event:
        """Return an event that passes after everything this thread has given to the compute queue so far. `uses` names
        the ranges that this work may still read; only the emulated device's race detector looks at them."""

    def wait(self, event: Event) -> None:
        """Make compute issued later wait. Blocks the caller on the emulated device only."""

    def retire(self, address: int, nbytes: int) -> None:
        """Say that nobody will use these bytes again before a copy has filled them."""

    def memory_info(self) -> tuple[int, int]:
        """Return (free_nbytes, total_nbytes) of the first tier."""

    def link_info(self) -> LinkInfo: ...

    def synchronize(self) -> None:
        """Block until both copy queues and the compute queue are empty; raises the first error they met."""

    def close(self) -> None:
        """Finish what is queued and end the device's threads. Blocks; idempotent. No copy may follow; arenas may be
        closed before or after."""


class PassedEvent:
    """The event of a device that computes before it returns."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


class CpuDevice:
    """Computes in RAM, which is then the first tier; nothing is ever copied. With `poison` (tests), retired memory is
    filled with NaN, so that a stale read is seen."""

    name = "cpu"
    has_gpu_tier = False

    def __init__(self, *, poison: bool = False) -> None:
        self.torch_device = torch.device("cpu")
        self._poison = poison

    def allocate(self, nbytes: int, *, name: str) -> ArenaLike:
        raise UnsupportedError(f"the CPU has no gpu tier to allocate {name!r} in; use allocate_host")

    def allocate_host(self, nbytes: int, *, name: str) -> ArenaLike:
        return Arena(nbytes, name=name)

    def copy(
        self,
        dst: int,
        src: int,
        nbytes: int,
        *,
        to_device: bool,
        after: Sequence[Event] = (),
        on_done: Callable[[BaseException | None], None] | None = None,
    ) -> Event:
        raise UnsupportedError("the CPU has no gpu tier to copy to or from; read into the slot itself")

    def adopt(self, where: Range) -> None:
        return

    def record(self, uses: Sequence[Range] = ()) -> Event:
        return PassedEvent()

    def wait(self, event: Event) -> None:
        event.synchronize()

    def retire(self, address: int, nbytes: int) -> None:
        if self._poison:
            ctypes.memset(address, POISON, nbytes)

    def memory_info(self) -> tuple[int, int]:
        found = detect_cpu()
        return found.available_nbytes, found.total_nbytes

    def link_info(self) -> LinkInfo:
        return LinkInfo()

    def synchronize(self) -> None:
        return

    def close(self) -> None:
        return


def open_device(
    name: str = "auto",
    *,
    capacity_nbytes: int | None = None,
    bandwidth_bytes_per_s: float | None = None,
    latency_s: float = 0.0,
) -> Device:
    """Open "auto", "cpu", "cuda", "cuda:1", "xpu" or "emulated"; the caller closes it.

    "auto" is the accelerator that torch sees (CUDA or XPU), else the CPU. The sizes and rates are those of the emulated
    GPU. Raises ConfigError for a name, or an option, that cannot work here.
    """
    kind, _, index = name.partition(":")
    is_numbered = kind in ("cuda", "xpu") and index.isdecimal()
    if kind not in ("auto", "cpu", "cuda", "xpu", "emulated") or (":" in name and not is_numbered):
        raise ConfigError(f'device={name!r} is not known; choose "auto", "cpu", "cuda", "cuda:1", "xpu" or "emulated"')
    if kind == "emulated":
        from hetero.memory.device_emulated import EmulatedDevice

        if capacity_nbytes is None:
            raise ConfigError('device="emulated" needs to know how large it is: set gpu_memory, for example "24MiB"')
        return EmulatedDevice(capacity_nbytes, bandwidth_bytes_per_s=bandwidth_bytes_per_s, latency_s=latency_s)
    if bandwidth_bytes_per_s is not None or latency_s:
        raise ConfigError(f'a link speed can only be set with device="emulated", got device={name!r}')
    found = torch.accelerator.current_accelerator(check_available=True)
    if kind == "auto":
        kind = found.type if found is not None and found.type in ("cuda", "xpu") else "cpu"
    if kind == "cpu":
        return CpuDevice()
    if found is None or found.type != kind:
        seen = f"torch sees {found.type}" if found is not None else "torch sees no accelerator"
        raise ConfigError(
            f"device={name!r} cannot be used: {seen} (torch {torch.__version__}); install a torch build for {kind} and "
            'its driver, or use device="cpu" or "emulated"'
        )
    if index and int(index) >= torch.accelerator.device_count():
        raise ConfigError(f"device={name!r} does not exist: there are {torch.accelerator.device_count()}")
    from hetero.memory.device_cuda import AcceleratorDevice

    return AcceleratorDevice(torch.device(kind, int(index or torch.accelerator.current_device_index())))
