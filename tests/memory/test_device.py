"""The emulated GPU keeps its capacity, its order, its speed and its poison; the CUDA path makes the right calls."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from hetero.io.arena import Arena
from hetero.io.errors import ConfigError, OutOfMemoryError, UnsupportedError
from hetero.memory.device import ArenaLike, CpuDevice, Device, open_device
from hetero.memory.device_cuda import AcceleratorDevice
from hetero.memory.device_emulated import EmulatedDevice
from hetero.memory.races import RaceError
from hetero.memory.residency import alias

MIB = 1 << 20
CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("no_leaks")


def view(arena: ArenaLike, nbytes: int | None = None) -> npt.NDArray[np.uint8]:
    return alias(arena.address, nbytes or arena.nbytes, CPU, lambda: None).numpy()


class Rig:
    """An emulated device with one gpu arena and one host arena of random bytes, 1 MiB each unless told."""

    def __init__(self, nbytes: int = MIB, **options: Any) -> None:
        self.device = EmulatedDevice(8 * MIB, **options)
        self.gpu = self.device.allocate(nbytes, name="gpu")
        self.host = self.device.allocate_host(nbytes, name="host")
        view(self.host)[:] = np.random.default_rng(0).integers(0, 255, nbytes, np.uint8)

    def close(self) -> None:
        self.device.close()
        self.gpu.close()
        self.host.close()


@contextmanager
def rig(nbytes: int = MIB, **options: Any) -> Iterator[Rig]:
    made = Rig(nbytes, **options)
    try:
        yield made
    finally:
        made.close()


# the emulated GPU: memory


def test_capacity_is_hard() -> None:
    device = EmulatedDevice(3 * MIB)
    first = device.allocate(2 * MIB, name="ring")
    assert device.memory_info() == (MIB, 3 * MIB)
    with pytest.raises(OutOfMemoryError, match=r"3\.0 MiB has 1\.0 MiB free; 'kv' asks for 1\.0 MiB") as caught:
        device.allocate(MIB + 1, name="kv")
    assert (caught.value.tier, caught.value.requested_nbytes, caught.value.free_nbytes) == ("gpu", MIB + 1, MIB)
    second = device.allocate(MIB, name="kv")
    assert device.memory_info() == (0, 3 * MIB)
    first.close()
    first.close()
    assert device.memory_info() == (2 * MIB, 3 * MIB)
    second.close()
    device.close()
    device.close()


def test_new_and_retired_memory_is_nan() -> None:
    with rig() as r:
        assert (view(r.gpu) == 0xFF).all()
        r.device.copy(r.gpu.address, r.host.address, MIB, to_device=True).synchronize()
        assert (view(r.gpu) == view(r.host)).all()
        r.device.retire(r.gpu.address + 4096, 8192)
        poisoned = view(r.gpu)[4096 : 4096 + 8192]
        assert (poisoned == 0xFF).all()
        assert np.isnan(poisoned.view(np.float16)).all()
        assert (view(r.gpu)[:4096] == view(r.host)[:4096]).all()
        assert (view(r.gpu)[12288:] == view(r.host)[12288:]).all()


def test_without_poison_nothing_is_written() -> None:
    with rig(poison=False) as r:
        assert (view(r.gpu) == 0).all()
        r.device.retire(r.gpu.address, MIB)
        assert (view(r.gpu) == 0).all()


def test_copies_must_touch_the_device() -> None:
    with rig() as r, pytest.raises(AssertionError, match="not inside the device's memory"):
        r.device.copy(r.host.address, r.gpu.address, MIB, to_device=True)


# the emulated GPU: copies, order, callbacks


def test_round_trip() -> None:
    with rig() as r:
        back = r.device.allocate_host(MIB, name="back")
        up = r.device.copy(r.gpu.address, r.host.address, MIB, to_device=True)
        r.device.copy(back.address, r.gpu.address, MIB, to_device=False, after=[up]).synchronize()
        assert (view(back) == view(r.host)).all()
        back.close()


def test_bytes_arrive_only_at_the_end() -> None:
    # Long copy, no compute: whoever reads without waiting finds poison, not the bytes.
    with rig(latency_s=0.2) as r:
        event = r.device.copy(r.gpu.address, r.host.address, MIB, to_device=True)
        assert not event.query()
        assert (view(r.gpu) == 0xFF).all()
        r.device.wait(event)
        assert event.query()
        assert (view(r.gpu) == view(r.host)).all()


def test_on_done_runs_once_on_a_device_thread_after_the_bytes_have_arrived() -> None:
    with rig() as r:
        seen: list[tuple[BaseException | None, bool, str]] = []
        called = threading.Event()

        def on_done(error: BaseException | None) -> None:
            arrived = bool((view(r.gpu) == view(r.host)).all())
            seen.append((error, arrived, threading.current_thread().name))
            called.set()

        r.device.copy(r.gpu.address, r.host.address, MIB, to_device=True, on_done=on_done)
        assert called.wait(10)
        r.device.synchronize()
        assert seen == [(None, True, "hetero-copy-to-device")]


def test_a_lock_held_around_copy_and_taken_in_on_done_does_not_deadlock() -> None:
    # The executor does exactly this.
    with rig() as r:
        lock, called = threading.Lock(), threading.Event()

        def on_done(error: BaseException | None) -> None:
            with lock:
                r.device.record()
                called.set()

        with lock:
            r.device.copy(r.gpu.address, r.host.address, MIB, to_device=True, on_done=on_done)
            r.device.retire(r.host.address, 0)
        assert called.wait(10)


def test_copies_of_one_direction_end_in_order() -> None:
    with rig(latency_s=0.002) as r:
        order: list[int] = []
        for index in range(10):
            start = index * 4096
            r.device.copy(
                r.gpu.address + start,
                r.host.address + start,
                4096 if index % 2 else 1,
                to_device=True,
                on_done=lambda error, index=index: order.append(index),  # type: ignore[misc]
            )
        r.device.close()
        assert order == list(range(10))


def test_directions_do_not_wait_for_each_other() -> None:
    with rig() as r:
        gate = GatedEvent()
        blocked = r.device.copy(r.gpu.address, r.host.address, 4096, to_device=True, after=[gate])
        down = r.device.copy(r.host.address + 8192, r.gpu.address + 8192, 4096, to_device=False)
        down.synchronize()
        assert not blocked.query()
        gate.open.set()
        blocked.synchronize()


class GatedEvent:
    """An event that passes when the test says so."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.open = threading.Event()
        self.error = error

    def query(self) -> bool:
        return self.open.is_set()

    def synchronize(self) -> None:
        self.open.wait()
        if self.error is not None:
            raise self.error


def test_a_copy_waits_for_every_event_in_after() -> None:
    with rig() as r:
        first, second = GatedEvent(), GatedEvent()
        event = r.device.copy(r.gpu.address, r.host.address, MIB, to_device=True, after=[first, second])
        first.open.set()
        time.sleep(0.02)
        assert not event.query()
        assert (view(r.gpu) == 0xFF).all()
        second.open.set()
        event.synchronize()
        assert (view(r.gpu) == view(r.host)).all()


def test_a_failed_copy_reports_everywhere_and_the_next_one_runs() -> None:
    with rig() as r:
        broken = GatedEvent(ValueError("lost"))
        broken.open.set()
        errors: list[BaseException | None] = []
        event = r.device.copy(
            r.gpu.address, r.host.address, 4096, to_device=True, after=[broken], on_done=errors.append
        )
        with pytest.raises(ValueError, match="lost"):
            r.device.wait(event)
        assert (view(r.gpu)[:4096] == 0xFF).all()
        r.device.copy(r.gpu.address, r.host.address, 4096, to_device=True).synchronize()
        assert (view(r.gpu)[:4096] == view(r.host)[:4096]).all()
        assert errors == [broken.error]
        with pytest.raises(ValueError, match="lost"):
            r.device.synchronize()


def test_a_callback_that_raises_is_logged_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with rig() as r:

        def on_done(error: BaseException | None) -> None:
            raise KeyError("callback")

        r.device.copy(r.gpu.address, r.host.address, 4096, to_device=True, on_done=on_done)
        r.device.copy(r.gpu.address, r.host.address, 4096, to_device=True).synchronize()
    assert "a completion callback failed" in caplog.text


# the emulated GPU: speed


class Clock:
    """perf_counter and sleep that only move when somebody sleeps: throttling is tested without waiting for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, oversleep_s: float = 0.0) -> None:
        self.now_s, self._oversleep_s = 100.0, oversleep_s
        monkeypatch.setattr("hetero.memory.device_emulated.time", self)

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds + self._oversleep_s


def test_a_copy_takes_latency_plus_size_over_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    with rig(bandwidth_bytes_per_s=2 * MIB, latency_s=0.25) as r:
        gate = GatedEvent()  # holds the queue until all are issued, at one moment of the clock
        told_s: list[float] = []
        events = [
            r.device.copy(
                r.gpu.address,
                r.host.address,
                MIB,
                to_device=True,
                after=[gate],
                on_done=lambda error: told_s.append(clock.now_s),
            ),
            r.device.copy(r.gpu.address, r.host.address, MIB // 2, to_device=True),
            r.device.copy(r.gpu.address, r.host.address, 1, to_device=True),
        ]
        gate.open.set()
        r.device.synchronize()
        ends = [getattr(event, "passes_at_s") for event in events]  # noqa: B009
        assert told_s == pytest.approx([100.75], abs=1e-9)  # nobody hears of a copy before it is due
        assert ends == pytest.approx([100.75, 101.25, 101.5], abs=1e-5)
        clock.now_s = 110.0
        later = r.device.copy(r.gpu.address, r.host.address, MIB, to_device=True)
        later.synchronize()
        assert getattr(later, "passes_at_s") == pytest.approx(110.75)  # noqa: B009
        assert r.device.link_info().bandwidth_bytes_per_s == 2 * MIB
        assert r.device.link_info().latency_s == 0.25


def test_late_wake_ups_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, oversleep_s=0.01)
    with rig(bandwidth_bytes_per_s=10 * MIB) as r:
        gate = GatedEvent()
        for _ in range(50):
            r.device.copy(r.gpu.address, r.host.address, MIB, to_device=True, after=[gate])
        gate.open.set()
        r.device.synchronize()
    assert clock.now_s - 100.0 == pytest.approx(5.0, abs=0.03)


def test_a_copy_starts_when_what_it_waits_for_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    with rig(latency_s=1.0, event_lag_s=5.0) as r:
        fence = r.device.record()
        event = r.device.copy(r.gpu.address, r.host.address, 4096, to_device=True, after=[fence])
        event.synchronize()
        assert getattr(event, "passes_at_s") == pytest.approx(106.0)  # noqa: B009


# the emulated GPU: races


def test_a_missing_wait_for_compute_is_caught() -> None:
    with rig(event_lag_s=60.0) as r:
        device = r.device
        fence = device.record([(r.gpu.address, 8192)])
        assert not fence.query()
        with pytest.raises(RaceError, match="compute reads"):
            device.copy(r.gpu.address + 4096, r.host.address, 4096, to_device=True)
        with pytest.raises(RaceError, match="is retired while compute reads"):
            device.retire(r.gpu.address, 4096)
        device.copy(r.gpu.address + 8192, r.host.address, 4096, to_device=True).synchronize()
        device.wait(fence)  # compute is in order with itself: does not take a minute


def test_waiting_for_compute_is_not_a_race() -> None:
    with rig(event_lag_s=0.05) as r:
        fence = r.device.record([(r.gpu.address, MIB)])
        event = r.device.copy(r.gpu.address, r.host.address, MIB, to_device=True, after=[fence])
        assert not event.query()
        event.synchronize()
        assert fence.query()
        r.device.retire(r.gpu.address, MIB)


def test_reading_back_a_retired_slot_is_caught() -> None:
    with rig() as r:
        r.device.copy(r.gpu.address, r.host.address, MIB, to_device=True).synchronize()
        r.device.retire(r.gpu.address, MIB)
        with pytest.raises(RaceError, match="retired"):
            r.device.copy(r.host.address, r.gpu.address, MIB, to_device=False)


def test_memory_of_a_closed_arena_is_forgotten() -> None:
    device = EmulatedDevice(MIB)
    arena = device.allocate(MIB, name="first")
    device.retire(arena.address, MIB)
    old = arena.address
    arena.close()
    assert device._races is not None and device._races._retired == []
    second = device.allocate(MIB, name="second")
    host = Arena(MIB, name="host")
    if old in (host.address, second.address):
        device.copy(second.address, host.address, MIB, to_device=True).synchronize()
    device.close()
    second.close()
    host.close()


def test_detection_can_be_turned_off() -> None:
    with rig(event_lag_s=60.0, detect_races=False) as r:
        r.device.record([(r.gpu.address, MIB)])
        r.device.copy(r.gpu.address, r.host.address, MIB, to_device=True).synchronize()
        r.device._last_recorded.passes_at_s = 0.0  # so that nothing waits a minute


@pytest.mark.parametrize(
    "options",
    [
        {"capacity_nbytes": 0},
        {"bandwidth_bytes_per_s": 0},
        {"latency_s": -1.0},
        {"bandwidth_bytes_per_s": float("nan")},
    ],
    ids=str,
)
def test_impossible_cards_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="above 0"):
        EmulatedDevice(**{"capacity_nbytes": MIB} | options)


# the CPU, and choosing a device


def test_cpu_device() -> None:
    device: Device = CpuDevice(poison=True)
    assert not device.has_gpu_tier
    arena = device.allocate_host(8192, name="slots")
    event = device.record([(arena.address, 4096)])
    assert event.query()
    device.wait(event)
    device.retire(arena.address, 4096)
    assert (view(arena)[:4096] == 0xFF).all() and (view(arena)[4096:] == 0).all()
    free, total = device.memory_info()
    assert 0 < free <= total
    for act in (
        lambda: device.allocate(1, name="x"),
        lambda: device.copy(arena.address, arena.address, 1, to_device=True),
    ):
        with pytest.raises(UnsupportedError, match="no gpu tier"):
            act()
    device.synchronize()
    device.close()
    arena.close()


def test_cpu_device_without_poison_leaves_retired_bytes() -> None:
    device = CpuDevice()
    arena = device.allocate_host(4096, name="slots")
    device.retire(arena.address, 4096)
    assert (view(arena) == 0).all()
    arena.close()


def test_open_device() -> None:
    assert open_device("cpu").name == "cpu"
    emulated = open_device("emulated", capacity_nbytes=5 * MIB, bandwidth_bytes_per_s=1e9, latency_s=1e-5)
    assert emulated.memory_info() == (5 * MIB, 5 * MIB)
    assert emulated.link_info().bandwidth_bytes_per_s == 1e9
    emulated.close()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gpu", {}, "'gpu' is not known; choose"),
        ("", {}, "is not known"),
        ("cpu:0", {}, "is not known"),
        ("cuda:x", {}, "is not known"),
        ("emulated", {}, "set gpu_memory"),
        ("cpu", {"bandwidth_bytes_per_s": 1e9}, "only be set with device=.emulated"),
        ("auto", {"latency_s": 1.0}, "only be set with device=.emulated"),
    ],
)
def test_open_device_refuses(name: str, options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_device(name, **options)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator here")
@pytest.mark.parametrize("name", ["cuda", "cuda:1", "xpu"])
def test_an_absent_accelerator_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"device='{name}' cannot be used: torch sees no accelerator"):
        open_device(name)
    assert open_device("auto").name == "cpu"


# CUDA and XPU: the calls they make, against a stand-in for torch.cuda that computes on the CPU at once


class FakeRuntime:
    """torch.cuda's shape. Every call is written down; events pass when the test opens them."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.events: list[FakeCudaEvent] = []
        self.open = True
        self.register_code = 0
        self.registered: dict[int, int] = {}
        self._names = iter(["up", "down"])
        self._current = FakeStream(self, "compute")

    def Stream(self, device: torch.device) -> FakeStream:
        return FakeStream(self, next(self._names))

    def Event(self, **options: bool) -> FakeCudaEvent:
        event = FakeCudaEvent(self, len(self.events))
        if self.open:
            event.gate.set()
        self.events.append(event)
        return event

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.log.append(f"enter {stream.name}")
        yield
        self.log.append(f"leave {stream.name}")

    def current_stream(self, device: torch.device) -> FakeStream:
        return self._current

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 3, 7

    def synchronize(self, device: torch.device) -> None:
        self.log.append("synchronize")

    def cudart(self) -> FakeRuntime:
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if self.register_code == 0:
            self.registered[address] = nbytes
        return self.register_code

    def cudaHostUnregister(self, address: int) -> int:
        self.log.append("unregister")
        del self.registered[address]
        return 0


class FakeStream:
    def __init__(self, runtime: FakeRuntime, name: str) -> None:
        self.runtime, self.name = runtime, name

    def wait_event(self, event: FakeCudaEvent) -> None:
        self.runtime.log.append(f"{self.name} waits for {event.number}")

    def record_event(self, event: FakeCudaEvent) -> None:
        event.record(self)

    def synchronize(self) -> None:
        return


class FakeCudaEvent:
    def __init__(self, runtime: FakeRuntime, number: int) -> None:
        self.runtime, self.number = runtime, number
        self.gate = threading.Event()
        self.error: BaseException | None = None

    def record(self, stream: FakeStream) -> None:
        self.runtime.log.append(f"{stream.name} records {self.number}")

    def query(self) -> bool:
        return self.gate.is_set()

    def synchronize(self) -> None:
        self.gate.wait()
        if self.error is not None:
            raise self.error


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime()


@pytest.fixture
def accelerator(runtime: FakeRuntime) -> Iterator[AcceleratorDevice]:
    device = AcceleratorDevice(CPU, runtime=runtime)
    yield device
    device.close()


@pytest.fixture
def cuda(runtime: FakeRuntime) -> Iterator[AcceleratorDevice]:
    """For the branches that ask for CUDA by name; its memory cannot be touched."""
    device = AcceleratorDevice(torch.device("cuda", 0), runtime=runtime)
    yield device
    device.close()


@pytest.fixture
def pair() -> Iterator[tuple[Arena, Arena]]:
    dst, src = Arena(4096, name="dst"), Arena(4096, name="src")
    view(src)[:] = np.arange(4096) % 251
    yield dst, src
    dst.close()
    src.close()


def test_accelerator_copy_waits_copies_and_records_in_that_order(
    accelerator: AcceleratorDevice, runtime: FakeRuntime, pair: tuple[Arena, Arena]
) -> None:
    dst, src = pair
    fence = accelerator.record([(dst.address, 4096)])
    event = accelerator.copy(dst.address, src.address, 4096, to_device=True, after=[fence])
    accelerator.wait(event)
    assert runtime.log == [
        "compute records 0",
        "up waits for 0",
        "enter up",
        "leave up",
        "up records 1",
        "compute waits for 1",
    ]
    assert (view(dst) == view(src)).all()
    runtime.log.clear()
    accelerator.copy(src.address, dst.address, 4096, to_device=False)
    assert runtime.log[0] == "enter down"
    accelerator.retire(dst.address, 4096)
    assert accelerator.memory_info() == (3, 7)


def test_accelerator_calls_back_after_the_event_from_a_thread_of_its_own(
    accelerator: AcceleratorDevice, runtime: FakeRuntime, pair: tuple[Arena, Arena]
) -> None:
    runtime.open = False
    dst, src = pair
    done: list[tuple[int, BaseException | None, str]] = []

    def on_done(index: int) -> Callable[[BaseException | None], None]:
        return lambda error: done.append((index, error, threading.current_thread().name))

    for index in range(2):
        accelerator.copy(dst.address, src.address, 4096, to_device=True, on_done=on_done(index))
    accelerator.copy(src.address, dst.address, 4096, to_device=False, on_done=on_done(2))
    failure = RuntimeError("the device is lost")
    runtime.events[0].error = failure
    assert done == []
    for event in (runtime.events[2], runtime.events[1], runtime.events[0]):
        event.gate.set()
    accelerator.close()
    up = [entry for entry in done if entry[0] < 2]
    assert up == [(0, failure, "hetero-copy-to-device"), (1, None, "hetero-copy-to-device")]
    assert (2, None, "hetero-copy-from-device") in done


def test_accelerator_survives_a_callback_that_raises(
    accelerator: AcceleratorDevice, pair: tuple[Arena, Arena], caplog: pytest.LogCaptureFixture
) -> None:
    def on_done(error: BaseException | None) -> None:
        raise KeyError("callback")

    later = threading.Event()
    dst, src = pair
    accelerator.copy(dst.address, src.address, 4096, to_device=True, on_done=on_done)
    accelerator.copy(dst.address, src.address, 4096, to_device=True, on_done=lambda error: later.set())
    assert later.wait(10)
    assert "a completion callback failed" in caplog.text


def test_accelerator_arena_waits_before_it_gives_memory_back(
    accelerator: AcceleratorDevice, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: runtime.log.append("empty_cache"))
    arena = accelerator.allocate(8192, name="ring")
    assert arena.nbytes == 8192
    assert runtime.log == ["synchronize"]  # recycled memory may still be in use by compute
    arena.close()
    arena.close()
    assert runtime.log == ["synchronize", "synchronize", "empty_cache"]


def test_accelerator_out_of_memory_is_ours(accelerator: AcceleratorDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(OutOfMemoryError, match=r"3 bytes of 7 bytes free; 'ring' asks for 8\.0 KiB") as caught:
        accelerator.allocate(8192, name="ring")
    assert caught.value.tier == "gpu"


def test_host_arenas_are_page_locked_at_their_exact_size(cuda: AcceleratorDevice, runtime: FakeRuntime) -> None:
    arena = cuda.allocate_host(3 * 4096, name="staging")
    assert runtime.registered == {arena.address: 3 * 4096}
    arena.close()
    arena.close()
    assert runtime.log == ["synchronize", "unregister"]


def test_a_page_lock_failure_is_cleared_and_warned_of_once(
    cuda: AcceleratorDevice, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels: list[object] = []

    class Blamed:
        def add_(self, value: int) -> None:
            kernels.append(value)
            raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "ones", lambda *args, **options: Blamed())
    runtime.register_code = 2
    with caplog.at_level(logging.WARNING):
        arenas = [cuda.allocate_host(4096, name=f"staging {index}") for index in range(2)]
    assert len(kernels) == 2
    assert runtime.registered == {}
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "cannot page-lock 4.0 KiB for 'staging 0' (CUDA error 2)" in warnings[0].getMessage()
    for arena in arenas:
        arena.close()
    assert "unregister" not in runtime.log
