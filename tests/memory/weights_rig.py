"""Weights at addresses of our choice, their homes in a scratch file, and a check of bytes, addresses and the ledger."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from hetero.io.backends.base import Block
from hetero.io.backends.faulty import Fault, FaultyBackend
from hetero.io.engine import Engine, Request
from hetero.io.operation import finish
from hetero.io.scratch import ScratchStore
from hetero.memory.device import CpuDevice, Device
from hetero.memory.device_emulated import EmulatedDevice
from hetero.memory.homes import WEIGHTS, Homes
from hetero.memory.ledger import Ledger, LedgerEvent
from hetero.memory.weights import Place, WeightChunk, find_chunks

CPU = torch.device("cpu")
PLACES = {"cpu": (Place.FIRST, Place.DISK), "emulated": (Place.FIRST, Place.CPU, Place.DISK)}


def parameter_at(
    residue: int,
    shape: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    stride: Sequence[int] | None = None,
    seed: int = 0,
) -> nn.Parameter:
    """A parameter whose address is `residue` modulo 64, in a storage with other bytes before and after it."""
    stride = torch.empty(tuple(shape), device="meta").stride() if stride is None else tuple(stride)
    num_elements = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    rng = np.random.default_rng(seed)
    storage = torch.from_numpy(rng.integers(0, 120, num_elements * dtype.itemsize + 192, dtype=np.uint8)).clone()
    start = (residue - storage.data_ptr()) % 64
    data = torch.empty(0, dtype=dtype).set_(storage.untyped_storage(), start // dtype.itemsize, tuple(shape), stride)
    assert data.data_ptr() % 64 == residue
    return nn.Parameter(data, requires_grad=dtype.is_floating_point)


def like(tensor: Tensor) -> Tensor:
    """Other memory of the same geometry, gaps included."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def bytes_of(tensor: Tensor) -> bytes:
    """The elements' bytes, in their order."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


class Rig:
    """Homes of some parameters; `values` is what each must hold."""

    def __init__(
        self, named: Sequence[tuple[str, nn.Parameter]], device: Device, engine: Engine, store: ScratchStore | None
    ) -> None:
        self.named = list(named)
        self.values = {name: parameter.detach().clone() for name, parameter in named}
        self.geometry = {name: (p.dtype, p.shape, p.stride(), p.data_ptr() % 64) for name, p in named}
        self.device, self.engine, self.store = device, engine, store
        self.events: list[tuple[str, str, int]] = []
        self.limits = {"cpu": 1 << 30, "gpu": 1 << 30, "disk": 1 << 30}
        self.ledger = Ledger(self.limits, observer=self._observe)
        self.chunks = find_chunks(named, CPU, small_nbytes=1)
        self.homes = Homes(self.chunks, device=device, engine=engine, ledger=self.ledger, store=store)
        self.renew_ledger()

    def renew_ledger(self) -> None:
        """Book everything where it is, from nothing."""
        self.ledger = self.homes._ledger = Ledger(self.limits, observer=self._observe)
        for chunk in self.chunks:
            if chunk.place is not Place.DISK:
                self.homes.book(chunk)

    def _observe(self, ledger: Ledger, event: LedgerEvent) -> None:
        assert event.used_nbytes <= ledger.limit(event.tier)
        if event.holder == WEIGHTS:
            self.events.append((event.kind, event.tier, event.nbytes))

    def write(self, name: str, rng: random.Random) -> None:
        """Change one parameter by one of the ways that people have, and its expected value with it."""
        parameter, value = dict(self.named)[name], self.values[name]
        new = np.random.default_rng(rng.randrange(1 << 30)).integers(0, 100, tuple(value.shape))
        value.copy_(torch.from_numpy(np.asarray(new)))
        way = rng.randrange(4)
        if way == 0:
            with torch.no_grad():
                parameter.copy_(value)
        elif way == 1:
            parameter.data.copy_(value)
        elif way == 2 and parameter.dtype != torch.bfloat16:
            parameter.detach().numpy()[...] = value.numpy()
        else:
            parameter.data = like(parameter).copy_(value)

    def check(self) -> None:
        """Every parameter holds its value, at its address modulo 64 unless a user has put it somewhere else, and the
        ledger has every chunk where it is."""
        self.check_values()
        homes = {id(v.parameter): h.data_ptr() for c in self.chunks for v, h in zip(c.views, c.home, strict=True)}
        for name, parameter in self.named:
            if homes.get(id(parameter)) == parameter.data_ptr():
                assert parameter.data_ptr() % 64 == self.geometry[name][-1], name
        self.check_ledger()

    def check_values(self) -> None:
        for name, parameter in self.named:
            assert (parameter.dtype, parameter.shape, parameter.stride()) == self.geometry[name][:3], name
            assert bytes_of(parameter) == bytes_of(self.values[name]), name

    def check_values_and_addresses(self) -> None:
        self.check_values()
        for name, parameter in self.named:
            assert parameter.data_ptr() % 64 == self.geometry[name][-1], name

    def check_ledger(self) -> None:
        for tier in self.limits:
            here = sum(c.nbytes for c in self.chunks if self.homes.tier_of(c.place) == tier and tier != "disk")
            assert self.ledger.holders(tier).get(WEIGHTS, 0) == here, tier

    def direct(self, chunk: WeightChunk, start: int, data: np.ndarray | int) -> np.ndarray:
        """Write an array to the chunk's extent, `start` bytes into the chunk, or read that many, past the mapping."""
        assert self.store is not None and self.store.file is not None and chunk.extent is not None
        is_write = not isinstance(data, int)
        array = np.ascontiguousarray(data) if is_write else np.empty(data, np.uint8)
        offset = chunk.extent.offset + chunk.residue + start
        request = Request(self.store.file, offset, array.nbytes, array.ctypes.data, write=is_write)
        finish(self.engine.submit([request]))
        return array


@contextmanager
def weights_rig(
    folder: Path,
    named: Sequence[tuple[str, nn.Parameter]],
    device_name: str = "cpu",
    *,
    has_disk: bool = True,
    gpu_nbytes: int = 16 << 20,
    fault: Callable[[Block], Fault | None] = lambda block: None,
    **engine_options: object,
) -> Iterator[Rig]:
    device: Device = EmulatedDevice(gpu_nbytes) if device_name == "emulated" else CpuDevice(poison=True)
    engine = Engine(wrap_backend=lambda inner: FaultyBackend(inner, fault), **engine_options)  # type: ignore[arg-type]
    store = ScratchStore(folder, 4 << 20, engine=engine) if has_disk else None
    try:
        yield Rig(named, device, engine, store)
    finally:
        if store is not None:
            store.close()
        engine.close()
        device.close()
