"""Tensors over memory that somebody else owns: an alias whose death is reported, and what a released weight shows.

Note [Lifetime of an alias]
    A slot's memory belongs to an arena. `alias` makes a tensor over it that has a *storage of its own*, so torch's and
    numpy's reference counts answer the only question that matters: may the slot be reused? Views, `detach()`, `.data`,
    `Parameter`, `numpy()`, `untyped_storage()` and tensors saved by autograd all hold the storage. When the last of
    them dies, `on_death` runs on whichever thread dropped it, possibly inside the garbage collector, possibly while
    that thread holds a lock of ours. It may therefore only append to a `collections.deque` (atomic, takes no lock); the
    executor drains it. A raw pointer is not protected, and neither is the memory itself: whoever makes an alias gives
    it the arena's `keeper`, so that the pages stay mapped as long as a stranger's view.
    On a GPU this is host time: kernels may still read the slot. Events are recorded when the queue is drained.
"""

from __future__ import annotations

import ctypes
import mmap
import operator
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

BLOCK_NBYTES = 2 << 20  # physical memory behind a placeholder, up to MAX_MAPPINGS of them
MAX_MAPPINGS = 8192  # Linux allows 65530 per process (vm.max_map_count); stay far below


nothing = [].clear
"""What happens when an alias dies that nobody waits for. C code, so that no interrupt is lost in it."""


def alias(
    address: int,
    nbytes: int,
    torch_device: torch.device,
    on_death: Callable[[], None],
    keepers: Sequence[object] = (),
) -> torch.Tensor:
    """Return a uint8 tensor of shape `(nbytes,)` over foreign memory, with a storage of its own.

    `on_death` runs once, when the last tensor, array or storage aliasing it has died: see Note [Lifetime of an alias]
    for what it may do. It must not hold the tensor, directly or through an object, or that never happens. The alias
    holds `keepers`, which keep the memory mapped; without any the caller does.
    """
    assert nbytes > 0, f"an alias needs at least one byte, got {nbytes=}"
    if torch_device.type == "cpu":
        return torch.from_numpy(np.asarray(_Memory(address, nbytes, on_death, keepers)))
    return alias_dlpack(address, nbytes, torch_device, on_death, keepers)


class _Death(weakref.ref[Any]):
    """The last tensor is gone. When `on_death` is C code, so is everything from here to it: a KeyboardInterrupt has no
    line of Python to hit, where it would be printed, forgotten, and the death with it."""

    __slots__ = ("on_death",)
    on_death: Callable[[], None]


_tell = operator.methodcaller("on_death")


class _Memory:
    """A range of memory in numpy's array interface. The arrays made from it hold it, so its death is theirs."""

    __slots__ = ("__array_interface__", "__weakref__", "_death", "_keepers")

    def __init__(self, address: int, nbytes: int, on_death: Callable[[], None], keepers: Sequence[object]) -> None:
        self._death = _Death(self, _tell)
        self._death.on_death = on_death
        self._keepers = keepers
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}


# DLPack 0.x as torch imports it: https://dmlc.github.io/dlpack/latest/c_api.html


class _DLTensor(ctypes.Structure):
    _fields_: ClassVar = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype_code", ctypes.c_uint8),
        ("dtype_bits", ctypes.c_uint8),
        ("dtype_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),  # null: contiguous
        ("byte_offset", ctypes.c_uint64),
    ]


_KDL_DEVICE = {"cpu": 1, "cuda": 10 if torch.version.hip else 2, "xpu": 14}

_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def alias_dlpack(
    address: int,
    nbytes: int,
    torch_device: torch.device,
    on_death: Callable[[], None],
    keepers: Sequence[object] = (),
) -> torch.Tensor:
    """Do what `alias` does for a device numpy cannot address, through a DLPack capsule. Works on the CPU as well.

    torch exports an alias on the CPU, and imports it as one on the device: what tells of the death is C code, on any
    thread, also where an exception is on its way, which no function of Python's may be called with.
    """
    device_id = max(torch.empty(0, device=torch_device).get_device(), 0)  # "cuda" means the current one; -1 is the CPU
    capsule = torch._C._to_dlpack(alias(address, nbytes, torch.device("cpu"), on_death, keepers))
    exported = _DLTensor.from_address(_get_pointer(capsule, b"dltensor"))  # the first member of a DLManagedTensor
    assert exported.data == address and exported.shape[0] == nbytes
    exported.device_type, exported.device_id = _KDL_DEVICE[torch_device.type], device_id
    imported: torch.Tensor = torch.utils.dlpack.from_dlpack(capsule)
    return imported


class Placeholder:
    """What a released parameter points at: a region of NaN that looks like any tensor up to `nbytes` and owns 2 MiB.

    One block of 0xFF bytes is mapped read-only again and again over a virtual region as large as the largest tensor, so
    every tensor has its true shape, strides and contiguity, reads NaN in every float format (-1 in signed integers),
    and a stray write faults (SIGSEGV) instead of corrupting the heap. Once read, RSS counts the block once per mapping;
    PSS and the cgroup count it once. A GPU has no such mapping through torch: there the tensors are one element with
    0 strides, and a write is caught only by the optimizer guard.

    The tensors hold the region. It is unmapped when they and this object are gone.
    """

    def __init__(self, nbytes: int, torch_device: torch.device | None = None) -> None:
        self.torch_device = torch_device or torch.device("cpu")
        self.nbytes = max(nbytes, 16)
        if self.torch_device.type == "cpu":
            self._base = torch.from_numpy(np.asarray(_map_repeated_block(self.nbytes)))
        else:
            self._base = torch.full((16,), 0xFF, dtype=torch.uint8, device=self.torch_device)
        self.address = self._base.data_ptr()

    def tensor(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of that geometry; not a view of anything, with a version counter of its own."""
        if self.torch_device.type != "cpu":
            stride = [0] * len(shape)
        empty = torch.empty(0, dtype=dtype, device=self.torch_device)
        return empty.set_(self._base.untyped_storage(), 0, tuple(shape), tuple(stride))

    def holds(self, tensor: torch.Tensor) -> bool:
        """Say whether `tensor` is, or is a view of, one of these placeholders."""
        return tensor.device == self._base.device and tensor.untyped_storage().data_ptr() == self.address


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000


def _map_repeated_block(nbytes: int) -> _Memory:
    """Map one read-only block of 0xFF over `nbytes` of address space; unmapped when the returned object dies."""
    block_nbytes = BLOCK_NBYTES
    while nbytes > block_nbytes * MAX_MAPPINGS:
        block_nbytes *= 2
    region_nbytes = -(-nbytes // block_nbytes) * block_nbytes
    fd = os.memfd_create("hetero-placeholder", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, block_nbytes)
        piece = b"\xff" * BLOCK_NBYTES
        for offset in range(0, block_nbytes, BLOCK_NBYTES):
            os.pwrite(fd, piece, offset)
        reserve = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        start = _mmap(None, region_nbytes, 0, reserve, -1)
        memory = _Memory(start, nbytes, lambda: None, ())
        weakref.finalize(memory, _libc.munmap, start, region_nbytes).atexit = False
        for offset in range(0, region_nbytes, block_nbytes):
            _mmap(start + offset, block_nbytes, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd)
    finally:
        os.close(fd)  # the mappings keep the block
    return memory


class MappedFile:
    """A whole file as shared, writable memory; unmapped when this object and every alias that keeps it are gone."""

    def __init__(self, path: str | os.PathLike[str], nbytes: int) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self.address = _mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd)
        finally:
            os.close(fd)  # the mapping keeps the file
        self.nbytes = nbytes
        weakref.finalize(self, _libc.munmap, self.address, nbytes).atexit = False


def _mmap(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    start = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    if start is None or start == ctypes.c_void_p(-1).value:
        error_number = ctypes.get_errno()
        raise OSError(error_number, f"cannot map {nbytes} bytes: {os.strerror(error_number)}")
    return int(start)
