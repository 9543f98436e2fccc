"""The executor: right bytes at every lease, whatever the order, and nothing reused too early."""

from __future__ import annotations

import errno
import gc
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.io.backends.faulty import Fault, FaultyBackend
from hetero.io.engine import Engine
from hetero.io.errors import HeteroError, IOEngineError, OutOfMemoryError
from hetero.memory.device_emulated import EmulatedDevice
from hetero.memory.schedule import Stay, stays_of
from tests.memory.executor_rig import rig

SIZES = [30_000, 9_000, 50_000, 12_345, 30_000, 4_096, 70_000, 30_000]
SLOTS = [40_960, 16_384, 57_344, 20_480, 40_960, 12_288, 77_824, 40_960]  # upper bounds
pytestmark = pytest.mark.usefixtures("no_leaks")


def emulated(**options: Any) -> EmulatedDevice:
    return EmulatedDevice(64 << 20, **options)


@pytest.mark.parametrize("ring_nbytes", [77_824, 131_072, 1 << 20])
def test_streaming_in_order_shows_the_files_bytes_and_reads_each_once(tmp_path: Path, ring_nbytes: int) -> None:
    with rig(tmp_path, SIZES, ring_nbytes=ring_nbytes, resident=[1, 4]) as r:
        streamed = sum(r.chunks[i].read_nbytes for i in range(len(SIZES)) if i not in (1, 4))
        r.check_all(range(len(SIZES)))
        start = r.executor.stats.read_nbytes
        for _ in range(5):
            r.check_all(range(len(SIZES)))
        assert r.executor.stats.read_nbytes - start == 5 * streamed
        assert r.executor.stats.num_demands == 0


@pytest.mark.parametrize(
    ("bandwidth", "lag_s"), [(None, 0.0), (200e6, 0.0), (None, 2e-3), (50e6, 1e-3)], ids=["fast", "slow", "lag", "both"]
)
def test_gpu_streaming_waits_for_copies_and_for_compute(tmp_path: Path, bandwidth: float | None, lag_s: float) -> None:
    # Slow copies beside no compute: a lease that did not wait for its copy would see poison, a slot that was written
    # before its last use had passed makes the race detector raise.
    device = emulated(bandwidth_bytes_per_s=bandwidth, event_lag_s=lag_s)
    with rig(
        tmp_path, SIZES, ring_nbytes=131_072, resident=[1], host=[0, 3], staging_nbytes=131_072, device=device
    ) as r:
        for _ in range(4):
            r.check_all(range(len(SIZES)))
        assert r.executor.stats.num_demands == 0
        copied = sum(r.chunks[i].nbytes for i in range(len(SIZES)) if i != 1)
        assert r.executor.stats.copied_nbytes >= 4 * copied


@pytest.mark.parametrize("has_gpu", [False, True], ids=["cpu", "gpu"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_order_is_only_slower(tmp_path_factory: pytest.TempPathFactory, has_gpu: bool, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("order")
    resident = data.draw(st.sets(st.integers(0, 7), max_size=3))
    host = data.draw(st.sets(st.integers(0, 7), max_size=3)) - resident if has_gpu else set()
    order = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=40))
    ring = data.draw(st.sampled_from([81_920, 122_880, 400_000 // 4096 * 4096]))
    device = emulated(bandwidth_bytes_per_s=2e9) if has_gpu else None
    options: dict[str, Any] = {"device": device, "host": sorted(host), "staging_nbytes": ring} if has_gpu else {}
    with rig(folder, SIZES, ring_nbytes=ring, resident=sorted(resident), **options) as r:
        r.check_all(order)


@pytest.mark.parametrize("has_gpu", [False, True], ids=["cpu", "gpu"])
def test_moments_of_several_chunks_fit_an_exact_ring(tmp_path: Path, has_gpu: bool) -> None:
    options: dict[str, Any] = {"device": emulated(), "staging_nbytes": 81_920} if has_gpu else {}
    with rig(tmp_path, SIZES, ring_nbytes=1, **options) as probe:
        exact = max(probe.chunks[i].nbytes + probe.chunks[i + 1].nbytes for i in range(0, 8, 2))
    if has_gpu:
        options["device"] = emulated()
    with rig(tmp_path, SIZES, ring_nbytes=exact, **options) as r:
        for _ in range(3):
            for i in range(0, 8, 2):
                r.check(i, i + 1)


def test_repeated_uses_keep_the_chunk_until_the_last(tmp_path: Path) -> None:
    moments = [(0,), (0,), (1,), (1, 2), (2,), (3,)]
    stays = stays_of(moments, {0, 1, 2, 3})
    assert stays == [Stay(0, 2), Stay(1, 2), Stay(2, 2), Stay(3, 1)]
    with rig(tmp_path, SIZES[:4], ring_nbytes=1 << 18, schedule=stays) as r:
        for _ in range(3):
            for chunk_ids in moments:
                r.check(*chunk_ids)
        assert r.executor.stats.num_demands == 0


def test_a_chunk_that_is_never_scheduled_is_fetched_on_demand(tmp_path: Path) -> None:
    with rig(tmp_path, SIZES, ring_nbytes=131_072, schedule=[Stay(i, 1) for i in range(7)]) as r:
        r.check_all([0, 1, 7, 2, 3, 7, 4, 5, 6, 0])
        assert r.executor.stats.num_demands == 2


def test_a_new_order_is_followed_without_demands(tmp_path: Path) -> None:
    with rig(tmp_path, SIZES, ring_nbytes=131_072) as r:
        r.check_all(range(8))
        order = [3, 1, 0, 7, 2, 5, 6, 4]
        r.executor.follow([Stay(i, 1) for i in order])
        before = r.executor.stats.num_demands
        for _ in range(3):
            r.check_all(order)
        assert r.executor.stats.num_demands == before


@pytest.mark.parametrize("has_gpu", [False, True], ids=["cpu", "gpu"])
def test_an_alias_keeps_its_bytes_and_does_not_block_the_ring(tmp_path: Path, has_gpu: bool) -> None:
    options: dict[str, Any] = {"device": emulated(), "staging_nbytes": 131_072} if has_gpu else {}
    with rig(tmp_path, SIZES, ring_nbytes=262_144, **options) as r:
        (entry,) = r.executor.acquire((2,))
        kept = r.bytes_of(entry)[7:1000]
        del entry
        r.executor.release((2,))
        for _ in range(4):
            r.check_all([3, 4, 5, 6, 7, 0, 1])
            assert np.array_equal(kept.numpy(), r.contents[2][7:1000])


def test_aliases_that_fill_the_ring_are_named_and_freed(tmp_path: Path) -> None:
    with rig(tmp_path, SIZES, ring_nbytes=81_920) as r:
        (entry,) = r.executor.acquire((6,))
        kept = r.bytes_of(entry)
        del entry
        r.executor.release((6,))
        with pytest.raises(OutOfMemoryError, match="referenced by a tensor outside the model") as caught:
            r.check(2)
        assert caught.value.tier == "cpu"
        del kept, caught
        gc.collect()
        r.check_all([2, 6, 0])


def test_an_alias_in_a_reference_cycle_is_collected(tmp_path: Path) -> None:
    with rig(tmp_path, SIZES, ring_nbytes=81_920) as r:
        gc.disable()
        try:
            (entry,) = r.executor.acquire((6,))
            cycle: list[Any] = [r.bytes_of(entry)]
            cycle.append(cycle)
            del cycle, entry
            r.executor.release((6,))
            r.check(2)
            assert r.executor.stats.num_collections == 1
        finally:
            gc.enable()


@pytest.mark.parametrize("has_gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("fault", [Fault(error=errno.EIO), Fault(short_nbytes=4096)], ids=["EIO", "short"])
def test_a_failed_read_raises_at_its_lease_and_leaves_the_run_usable(
    tmp_path: Path, has_gpu: bool, fault: Fault
) -> None:
    bad = threading.Event()
    first_page: list[int] = []

    def choose(block: Any) -> Fault | None:
        return fault if bad.is_set() and block.offset == first_page[0] else None

    options: dict[str, Any] = {"device": emulated(), "staging_nbytes": 131_072} if has_gpu else {}
    engine = Engine(wrap_backend=lambda inner: FaultyBackend(inner, choose))
    with rig(tmp_path, SIZES, ring_nbytes=131_072, engine=engine, **options) as r:
        first_page.append(r.chunks[4].segments[0].offset)
        bad.set()
        r.check_all(range(4))
        with pytest.raises(IOEngineError, match=r"weights\.bin"):
            r.check(4)
        bad.clear()
        r.check_all([4, 5, 6, 7, 0, 1, 2, 3, 4])


def test_leases_after_close_are_refused(tmp_path: Path) -> None:
    with rig(tmp_path, SIZES, ring_nbytes=131_072) as r:
        r.check(0)
        r.executor.close()
        r.executor.close()
        with pytest.raises(HeteroError, match="closed"):
            r.check(1)


def test_close_waits_for_reads_in_flight(tmp_path: Path) -> None:
    engine = Engine(wrap_backend=lambda inner: FaultyBackend(inner, lambda block: Fault(delay_s=0.05)))
    with rig(tmp_path, SIZES, ring_nbytes=400_000 // 4096 * 4096, engine=engine) as r:
        r.executor.prefetch()
        r.executor.close()
        assert r.engine.stats().in_flight == 0


@pytest.mark.parametrize("has_gpu", [False, True], ids=["cpu", "gpu"])
def test_two_hundred_racy_passes(tmp_path: Path, has_gpu: bool) -> None:
    # Long transfers, no compute, a ring of two chunks, jitter in the reads: whatever is not waited for shows.
    rng = random.Random(0)
    engine = Engine(
        wrap_backend=lambda inner: FaultyBackend(
            inner, lambda block: Fault(delay_s=rng.random() * 2e-3) if rng.random() < 0.1 else None
        )
    )
    options: dict[str, Any] = {}
    if has_gpu:
        device = emulated(bandwidth_bytes_per_s=400e6, event_lag_s=2e-4)
        options = {"device": device, "host": [0, 5], "staging_nbytes": 131_072}
    with rig(tmp_path, SIZES, ring_nbytes=131_072, resident=[1], engine=engine, **options) as r:
        for number in range(200):
            order = list(range(8))
            if number % 10 == 3:
                rng.shuffle(order)
            r.check_all(order)


def test_ten_thousand_swaps_keep_descriptors_and_memory_flat(tmp_path: Path) -> None:
    import psutil

    process = psutil.Process()
    with rig(tmp_path, SIZES, ring_nbytes=131_072) as r:
        r.check_all(list(range(8)) * 50)
        gc.collect()
        descriptors, memory = process.num_fds(), process.memory_info().rss
        r.check_all(list(range(8)) * 1250)
        gc.collect()
        assert process.num_fds() == descriptors
        assert process.memory_info().rss - memory < 4 << 20
        assert r.executor.stats.num_leases == 10_400


def test_a_slot_waits_for_what_was_computed_with_a_view_that_outlived_its_lease(tmp_path: Path) -> None:
    # On a GPU the view's death is host time: kernels that read it may still be queued, long after the lease's fence.
    lag_s = 0.05
    device = emulated(event_lag_s=lag_s)
    with rig(tmp_path, SIZES[2:4], ring_nbytes=57_344, staging_nbytes=57_344, device=device) as r:
        (entry,) = r.executor.acquire((0,))
        kept = r.bytes_of(entry)
        slot = entry.space.address
        del entry
        r.executor.release((0,))
        time.sleep(2 * lag_s)  # the lease's own fence has passed
        died_s = time.perf_counter()
        del kept
        (entry,) = r.executor.acquire((1,))
        assert entry.space.address == slot
        assert time.perf_counter() - died_s >= lag_s
        del entry
        r.executor.release((1,))
