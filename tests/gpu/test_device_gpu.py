"""The device protocol on a real accelerator: bytes arrive, events order, page-locking works, copies overlap compute.

Run with `pytest -m gpu tests/gpu`; skipped where there is no CUDA or XPU device. Under a minute.
"""

from __future__ import annotations

import resource
import threading
import time
from collections import deque
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch

from hetero.io.errors import OutOfMemoryError
from hetero.memory import device_cuda
from hetero.memory.budget import detect_gpu
from hetero.memory.device import ArenaLike, Device, open_device
from hetero.memory.residency import alias

MIB = 1 << 20
NBYTES = 64 * MIB
pytestmark = pytest.mark.gpu


@pytest.fixture
def device() -> Iterator[Device]:
    opened = open_device("auto")
    assert opened.has_gpu_tier
    yield opened
    opened.close()


@pytest.fixture
def arenas(device: Device) -> Iterator[tuple[ArenaLike, ArenaLike, ArenaLike]]:
    """(gpu, host, host)"""
    made = (
        device.allocate(NBYTES, name="gpu"),
        device.allocate_host(NBYTES, name="host"),
        device.allocate_host(NBYTES, name="back"),
    )
    yield made
    for arena in made:
        arena.close()


def host_view(arena: ArenaLike) -> npt.NDArray[np.uint8]:
    return alias(arena.address, arena.nbytes, torch.device("cpu"), lambda: None).numpy()


def gpu_view(device: Device, arena: ArenaLike) -> torch.Tensor:
    return alias(arena.address, arena.nbytes, device.torch_device, lambda: None)


def long_compute(device: Device) -> torch.Tensor:
    """Queue some 50 ms of work and return without waiting."""
    a = torch.full((4096, 4096), 1e-3, device=device.torch_device)
    for _ in range(40):
        a = a @ a
    return a


def test_bytes_survive_a_round_trip(device: Device, arenas: tuple[ArenaLike, ...]) -> None:
    gpu, host, back = arenas
    host_view(host)[:] = np.random.default_rng(0).integers(0, 256, NBYTES, np.uint8)
    seen: list[BaseException | None] = []
    called = threading.Event()

    def on_done(error: BaseException | None) -> None:
        seen.append(error)
        called.set()

    up = device.copy(gpu.address, host.address, NBYTES, to_device=True)
    down = device.copy(back.address, gpu.address, NBYTES, to_device=False, after=[up], on_done=on_done)
    down.synchronize()
    assert called.wait(10)
    assert seen == [None]
    assert np.array_equal(host_view(back), host_view(host))


def test_odd_addresses_and_sizes(device: Device, arenas: tuple[ArenaLike, ...]) -> None:
    gpu, host, back = arenas
    host_view(host)[:] = np.random.default_rng(1).integers(0, 256, NBYTES, np.uint8)
    for offset, nbytes in ((1, 1), (3, 4097), (4095, 2 * MIB + 5)):
        up = device.copy(gpu.address + offset, host.address + offset, nbytes, to_device=True)
        device.copy(back.address + offset, gpu.address + offset, nbytes, to_device=False, after=[up]).synchronize()
        assert np.array_equal(host_view(back)[offset : offset + nbytes], host_view(host)[offset : offset + nbytes])


def test_compute_waits_for_the_copy_it_was_told_of(device: Device, arenas: tuple[ArenaLike, ...]) -> None:
    # Long copies, short compute: without `wait` the sum would be that of the old bytes.
    gpu, host, _ = arenas
    weights = gpu_view(device, gpu)
    for value in (1, 2, 3, 4):
        host_view(host)[:] = value
        event = device.copy(gpu.address, host.address, NBYTES, to_device=True)
        device.wait(event)
        assert int(weights.sum(dtype=torch.int64)) == value * NBYTES


def test_a_copy_waits_for_compute_that_reads_its_target(device: Device, arenas: tuple[ArenaLike, ...]) -> None:
    # Long compute, short copy: without `after` the copy would overwrite what is still to be read.
    gpu, host, _ = arenas
    weights = gpu_view(device, gpu)
    weights.fill_(1)
    host_view(host)[:] = 2
    device.synchronize()
    long_compute(device)
    total = weights.sum(dtype=torch.int64)
    fence = device.record([(gpu.address, NBYTES)])
    event = device.copy(gpu.address, host.address, NBYTES, to_device=True, after=[fence])
    assert not event.query()
    device.wait(event)
    assert int(total) == NBYTES
    assert int(weights.sum(dtype=torch.int64)) == 2 * NBYTES


def test_copies_do_not_wait_for_compute_unless_told(device: Device, arenas: tuple[ArenaLike, ...]) -> None:
    gpu, host, _ = arenas
    device.synchronize()
    result = long_compute(device)
    computed = device.record()
    event = device.copy(gpu.address, host.address, MIB, to_device=True)
    event.synchronize()
    assert not computed.query()  # the copy ended while compute was still busy: they overlap
    computed.synchronize()
    assert bool(result.isfinite().all())


def test_issuing_does_not_block_the_host(device: Device, arenas: tuple[ArenaLike, ...]) -> None:
    gpu, host, _ = arenas
    if not isinstance(host, device_cuda._LockedArena):
        pytest.skip("page-locking is not to be had here: copies from pageable memory block")
    device.synchronize()
    long_compute(device)
    fence = device.record()
    device.copy(gpu.address, host.address, NBYTES, to_device=True, after=[fence])
    assert not fence.query()


def test_dlpack_alias_reports_its_death_and_owns_its_storage(device: Device, arenas: tuple[ArenaLike, ...]) -> None:
    gpu, _, _ = arenas
    deaths: deque[int] = deque()
    tensor = alias(gpu.address, NBYTES, device.torch_device, lambda: deaths.append(1))
    assert tensor.device == device.torch_device
    assert tensor.untyped_storage().data_ptr() == gpu.address
    view = tensor[64:128].view(torch.float32)
    parameter = torch.nn.Parameter(view)
    del tensor, view
    assert len(deaths) == 0
    del parameter
    assert len(deaths) == 1


def test_host_arenas_are_page_locked(device: Device, arenas: tuple[ArenaLike, ...]) -> None:
    if device.torch_device.type != "cuda":
        pytest.skip("only CUDA registers host memory")
    _, host, _ = arenas
    assert alias(host.address, NBYTES, torch.device("cpu"), lambda: None).is_pinned()
    extra = device.allocate_host(4096, name="extra")
    address = extra.address
    assert alias(address, 4096, torch.device("cpu"), lambda: None).is_pinned()
    extra.close()


def test_a_failed_page_lock_leaves_no_error_behind(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    # The driver refuses to register a range twice; the next kernel must not be blamed for it.
    if device.torch_device.type != "cuda":
        pytest.skip("only CUDA registers host memory")
    first = device.allocate_host(MIB, name="first")

    class SameMemory:
        address, nbytes = first.address, first.nbytes

        def close(self) -> None:
            return

    monkeypatch.setattr(device_cuda, "Arena", lambda nbytes, name: SameMemory())
    second = device.allocate_host(MIB, name="second")
    assert isinstance(second, SameMemory)
    assert float(torch.ones(4, device=device.torch_device).mul_(2).sum()) == 8.0
    first.close()


def test_more_than_there_is_raises_ours(device: Device) -> None:
    _, total = device.memory_info()
    with pytest.raises(OutOfMemoryError, match="asks for"):
        device.allocate(2 * total, name="absurd")
    found = detect_gpu(device.torch_device)
    assert found.total_nbytes == total
    assert 0 < found.available_nbytes <= total


def test_waiting_does_not_spin(device: Device, arenas: tuple[ArenaLike, ...]) -> None:
    if device.torch_device.type != "cuda":
        pytest.skip("only CUDA events can block")
    gpu, host, _ = arenas
    long_compute(device)
    event = device.copy(gpu.address, host.address, NBYTES, to_device=True, after=[device.record()])
    before, start_s = resource.getrusage(resource.RUSAGE_THREAD).ru_utime, time.perf_counter()
    event.synchronize()
    spent_s, waited_s = resource.getrusage(resource.RUSAGE_THREAD).ru_utime - before, time.perf_counter() - start_s
    assert spent_s < 0.5 * waited_s or waited_s < 0.01
