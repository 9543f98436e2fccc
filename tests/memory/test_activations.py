"""Saved activations: every bit comes back from wherever it was, and the ledger knows where that is at every event."""

from __future__ import annotations

import errno
import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hetero.memory.activations as module
from hetero.io.backends.base import Block
from hetero.io.backends.faulty import Fault, FaultyBackend
from hetero.io.engine import Engine
from hetero.io.errors import IOEngineError, OutOfMemoryError
from hetero.io.scratch import ScratchStore
from hetero.memory.activations import ACTIVATIONS, Activation, ActivationStore, Policy
from hetero.memory.device import CpuDevice, Device, Event
from hetero.memory.device_emulated import EmulatedDevice
from hetero.memory.ledger import Ledger, LedgerEvent
from tests.interrupting import InterruptAt

pytestmark = pytest.mark.usefixtures("no_leaks")
DEVICES = ("cpu", "emulated")
POLICIES: tuple[Policy, ...] = ("keep", "cpu", "disk", "auto")
LARGE = module.LARGE_NBYTES
PLENTY = 1 << 30


class Unchanged:
    """A version counter that never moves."""

    def check(self) -> None:
        return


class Changed:
    def check(self) -> None:
        raise RuntimeError("modified by an inplace operation")


class Disk:
    """What becomes of each block, and the (is_write, nbytes) of those that came."""

    def __init__(self) -> None:
        self.fault: Callable[[Block], Fault | None] = lambda block: None
        self.blocks: list[tuple[bool, int]] = []

    def __call__(self, block: Block) -> Fault | None:
        self.blocks.append((block.write, block.useful_nbytes))
        return self.fault(block)

    def fail(self, *, write: bool, error: int = errno.EIO) -> None:
        self.fault = lambda block: Fault(error=error) if block.write is write else None

    def heal(self) -> None:
        self.fault = lambda block: None

    def reads(self) -> list[int]:
        return [nbytes for is_write, nbytes in self.blocks if not is_write]


class Rig:
    """A store, its ledger with every event, and what each saved tensor must hold."""

    def __init__(
        self,
        policy: Policy,
        device: Device,
        engine: Engine,
        store: ScratchStore | None,
        disk: Disk,
        limits: dict[str, int],
    ) -> None:
        self.device, self.engine, self.store, self.disk = device, engine, store, disk
        self.first = "gpu" if device.has_gpu_tier else "cpu"
        self.events: list[tuple[str, str, int]] = []
        self.ledger = Ledger(limits, observer=self._observe)
        self.activations = ActivationStore(
            policy, device=device, engine=engine, ledger=self.ledger, store=store, reserve=self._reserve
        )

    def _observe(self, ledger: Ledger, event: LedgerEvent) -> None:
        assert 0 <= event.used_nbytes <= ledger.limit(event.tier)
        assert event.used_nbytes == sum(ledger.holders(event.tier).values())
        self.events.append((event.kind, event.tier, event.nbytes))

    def _reserve(self, tier: str, holder: str, nbytes: int) -> None:
        short = nbytes - self.ledger.free(tier)
        if tier == self.first and short > 0:
            self.activations.make_room(short)
        self.ledger.take(tier, holder, nbytes)

    def save(self, nbytes: int, seed: int) -> tuple[Activation, Tensor]:
        """Save a tensor that nobody else keeps; also what it must hold."""
        torch.manual_seed(seed)
        tensor = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
        return self.activations.add(tensor, Unchanged()), tensor.clone()

    def tier_of(self, activation: Activation) -> str:
        """Where its bytes are, or are on their way to."""
        memory = activation._memory
        return memory.target or memory.tier

    def settle(self) -> None:
        """Let everything arrive that is on its way out."""
        self.activations.make_room(0)

    def booked(self, tier: str) -> int:
        return self.ledger.holders(tier).get(ACTIVATIONS, 0)

    def check_empty(self) -> None:
        gc.collect()  # an error's traceback may hold an owner
        self.activations.collect()
        assert all(self.ledger.used(tier) == 0 for tier in self.ledger.tiers())
        assert self.store is None or self.store.free_nbytes == self.store.nbytes
        assert not self.activations._memories and not self.activations._by_key and not self.activations._leaving


@contextmanager
def rig(
    folder: Path,
    policy: Policy = "auto",
    device_name: str = "cpu",
    *,
    first_nbytes: int = PLENTY,
    cpu_nbytes: int = PLENTY,
    disk_nbytes: int = 16 << 20,
    **engine_options: Any,
) -> Iterator[Rig]:
    """`cpu_nbytes` counts behind a gpu tier only; `disk_nbytes` 0: there is no disk tier."""
    disk = Disk()
    device: Device = CpuDevice(poison=True) if device_name == "cpu" else EmulatedDevice(1 << 20)
    limits = {"cpu": first_nbytes} if device_name == "cpu" else {"gpu": first_nbytes, "cpu": cpu_nbytes}
    engine = Engine(wrap_backend=lambda inner: FaultyBackend(inner, disk), **engine_options)
    store = ScratchStore(folder, disk_nbytes, engine=engine) if disk_nbytes else None
    try:
        yield Rig(policy, device, engine, store, disk, limits)
    finally:
        if store is not None:
            store.close()
        engine.close()
        device.close()


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Collect no garbage of torch's own after each test."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def small_window(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(module, "WINDOW_NBYTES", 3 * LARGE)
    return 3 * LARGE


# -- the life of an activation ----------------------------------------------------------------------------------------


def test_an_interrupt_as_an_activation_dies_is_raised_and_its_bytes_are_freed(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        activation, _ = r.save(LARGE, 0)
        with pytest.raises(KeyboardInterrupt), InterruptAt(1):
            del activation
            r.activations.collect()
        r.check_empty()


@pytest.mark.parametrize("policy", ["cpu", "disk"])
def test_copies_follow_what_is_computed_with_the_memory_now(
    tmp_path: Path, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU compute is still going on: it makes what leaves, and may read what memory for a return had before."""
    with rig(tmp_path, policy, "emulated") as r:
        recorded: list[Event] = []
        ordered: list[bool] = []
        record, copy = r.device.record, r.device.copy

        def recording(uses: Any = ()) -> Event:
            recorded.append(record(uses))
            return recorded[-1]

        def copying(*where: int, after: Any = (), **more: Any) -> Event:
            ordered.append(bool(recorded) and recorded[-1] in after)
            return copy(*where, after=after, **more)

        monkeypatch.setattr(r.device, "record", recording)
        monkeypatch.setattr(r.device, "copy", copying)
        activation, expected = r.save(LARGE, 0)
        r.settle()
        assert torch.equal(activation.unpack(), expected)
        assert ordered == [True, True]
        del activation
        r.check_empty()


# -- policies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_room", [True, False], ids=["roomy", "tight"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", ["cpu", "disk", "auto"])
def test_every_bit_comes_back_in_reverse_order(tmp_path: Path, policy: Policy, device: str, has_room: bool) -> None:
    sizes = [LARGE * 2, 5000, LARGE, 70_001, LARGE - 1, 3 * LARGE, 4096, LARGE * 2] * 2
    first_nbytes = PLENTY if has_room else 5 * LARGE
    with rig(tmp_path, policy, device, first_nbytes=first_nbytes, cpu_nbytes=6 * LARGE) as r:
        saved = [r.save(nbytes, i) for i, nbytes in enumerate(sizes)]
        r.settle()
        in_first = sum(size for size, (a, _) in zip(sizes, saved, strict=True) if r.tier_of(a) == r.first)
        assert r.booked(r.first) == in_first
        leaves_at_once = policy == "disk" or (policy == "cpu" and device == "emulated")
        if has_room and leaves_at_once:
            assert r.activations.out_nbytes == sum(size for size in sizes if size >= LARGE)
        assert (r.activations.out_nbytes > 0) is (leaves_at_once or not has_room)
        while saved:
            activation, expected = saved.pop()
            assert torch.equal(activation.unpack(), expected)
            del activation
        assert r.activations.back_nbytes == r.activations.out_nbytes
        r.check_empty()


@pytest.mark.parametrize("device", DEVICES)
def test_keep_moves_nothing_and_says_what_is_missing(tmp_path: Path, device: str) -> None:
    with rig(tmp_path, "keep", device, first_nbytes=3 * LARGE) as r:
        saved = [r.save(LARGE, i) for i in range(3)]
        with pytest.raises(OutOfMemoryError, match=f"the {r.first} budget is full"):
            r.save(1, 9)
        assert r.booked(r.first) == 3 * LARGE and r.activations.out_nbytes == 0 and not r.disk.blocks
        assert all(torch.equal(activation.unpack(), expected) for activation, expected in saved)
        saved.clear()
        r.check_empty()


@pytest.mark.parametrize("policy", ["cpu", "disk", "auto"])
@pytest.mark.parametrize("device", DEVICES)
def test_what_fits_nowhere_is_refused_and_the_rest_comes_back(tmp_path: Path, policy: Policy, device: str) -> None:
    with rig(tmp_path, policy, device, first_nbytes=2 * LARGE, cpu_nbytes=2 * LARGE, disk_nbytes=2 * LARGE) as r:
        saved: list[Any] = []
        with pytest.raises(OutOfMemoryError, match=f"the {r.first} budget is full"):
            for i in range(9):
                saved.append(r.save(LARGE, i))
        assert len(saved) == (6 if device == "emulated" and policy != "disk" else 4)
        while saved:
            activation, expected = saved.pop()
            assert torch.equal(activation.unpack(), expected)
            del activation
        r.check_empty()


def test_without_a_disk_tier_the_cpu_is_the_last_place(tmp_path: Path) -> None:
    with rig(tmp_path, "auto", "emulated", first_nbytes=2 * LARGE, cpu_nbytes=LARGE, disk_nbytes=0) as r:
        saved = [r.save(LARGE, i) for i in range(3)]
        assert [r.tier_of(activation) for activation, _ in saved] == ["cpu", "gpu", "gpu"]
        with pytest.raises(OutOfMemoryError):
            r.save(LARGE, 9)
        assert torch.equal(saved[2][0].unpack(), saved[2][1])


def test_the_cpu_policy_keeps_what_is_in_ram_already_until_room_is_short(tmp_path: Path) -> None:
    with rig(tmp_path, "cpu", "cpu", first_nbytes=3 * LARGE) as r:
        saved = [r.save(LARGE, i) for i in range(3)]
        assert r.activations.out_nbytes == 0
        saved.append(r.save(LARGE, 3))
        assert [r.tier_of(activation) for activation, _ in saved] == ["disk", "cpu", "cpu", "cpu"]


# -- order -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_the_oldest_leaves_first(tmp_path: Path, device: str) -> None:
    with rig(tmp_path, "auto", device, first_nbytes=4 * LARGE, cpu_nbytes=2 * LARGE) as r:
        saved = [r.save(LARGE, i) for i in range(9)]
        out = ["disk"] * 5 if device == "cpu" else ["cpu", "cpu", "disk", "disk", "disk"]
        assert [r.tier_of(activation) for activation, _ in saved] == out + [r.first] * 4
        assert r.activations.out_nbytes == 5 * LARGE


@pytest.mark.parametrize("device", DEVICES)
def test_making_room_frees_as_much_as_was_asked_for_and_no_more(tmp_path: Path, device: str) -> None:
    with rig(tmp_path, "auto", device) as r:
        saved = [r.save(LARGE, i) for i in range(5)]
        assert r.activations.make_room(LARGE + 1)
        assert r.booked(r.first) == 3 * LARGE
        assert not r.activations.make_room(4 * LARGE)
        assert r.booked(r.first) == 0
        assert all(torch.equal(activation.unpack(), expected) for activation, expected in saved)


def test_the_one_that_is_needed_next_is_read_ahead_of_need_in_reverse_order(tmp_path: Path, small_window: int) -> None:
    sizes = [LARGE + 4096 * i for i in range(8)]
    with rig(tmp_path, "disk") as r:
        saved = [r.save(nbytes, i) for i, nbytes in enumerate(sizes)]
        r.settle()
        assert r.booked("cpu") == 0 and r.disk.reads() == []
        activation, expected = saved.pop()
        assert torch.equal(activation.unpack(), expected)
        assert r.disk.reads() == [sizes[7], sizes[6], sizes[5]], "itself, and as many as the window holds"
        assert r.booked("cpu") == sum(sizes[5:])
        del activation
        while saved:
            activation, expected = saved.pop()
            assert torch.equal(activation.unpack(), expected)
            ahead = [size for size, (a, _) in zip(sizes, saved, strict=False) if r.tier_of(a) == "cpu"]
            assert sum(ahead) <= small_window
            del activation
        assert r.disk.reads() == sizes[::-1], "each once"
        r.check_empty()


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_is_read_ahead_that_there_is_no_room_for(tmp_path: Path, device: str) -> None:
    with rig(tmp_path, "disk", device, first_nbytes=2 * LARGE) as r:
        saved = [r.save(LARGE, i) for i in range(5)]
        r.settle()
        with r.ledger.hold(r.first, "others", LARGE):
            assert torch.equal(saved[4][0].unpack(), saved[4][1])
            assert r.disk.reads() == [LARGE] and r.booked(r.first) == LARGE


@pytest.mark.parametrize("device", DEVICES)
def test_no_more_than_a_window_is_on_its_way_out(tmp_path: Path, device: str, small_window: int) -> None:
    with rig(tmp_path, "disk", device) as r:
        r.disk.fault = lambda block: Fault(delay_s=0.01)
        saved = []
        for i in range(9):
            saved.append(r.save(LARGE, i))
            assert r.booked(r.first) <= small_window
            assert sum(memory.nbytes for memory in r.activations._leaving) <= small_window
        assert all(torch.equal(activation.unpack(), expected) for activation, expected in reversed(saved))


def test_what_came_back_no_longer_counts_as_leaving(tmp_path: Path, small_window: int) -> None:
    with rig(tmp_path, "disk") as r:
        for i in range(20):
            activation, expected = r.save(LARGE, i)
            r.settle()
            assert torch.equal(activation.unpack(), expected)
            del activation
            r.activations.collect()
            assert not r.activations._leaving


# -- the ledger --------------------------------------------------------------------------------------------------------


def test_every_event_of_a_trip_to_disk_and_back(tmp_path: Path) -> None:
    with rig(tmp_path, "disk") as r:
        activation, expected = r.save(LARGE, 0)
        assert r.events == [("take", "cpu", LARGE)], "its memory stays booked while it is written"
        r.settle()
        assert r.events[1:] == [("give", "cpu", LARGE)]
        assert torch.equal(activation.unpack(), expected)
        assert r.events[2:] == [("take", "cpu", LARGE)]
        del activation
        r.activations.collect()
        assert r.events[3:] == [("give", "cpu", LARGE)]
        r.check_empty()


def test_every_event_of_a_trip_to_the_cpu_and_back(tmp_path: Path) -> None:
    with rig(tmp_path, "cpu", "emulated") as r:
        activation, expected = r.save(LARGE, 0)
        assert r.events == [("take", "gpu", LARGE), ("take", "cpu", LARGE)], "both ends while it moves"
        r.settle()
        assert r.events[2:] == [("give", "gpu", LARGE)]
        assert torch.equal(activation.unpack(), expected)
        assert r.events[3:] == [("take", "gpu", LARGE), ("give", "cpu", LARGE)]
        del activation
        r.activations.collect()
        assert r.events[5:] == [("give", "gpu", LARGE)]
        r.check_empty()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_saving_asking_and_dropping_keeps_bytes_and_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, policy: Policy, seed: int
) -> None:
    monkeypatch.setattr(module, "WINDOW_NBYTES", 2 * LARGE)
    rng = random.Random(seed)
    limits = {"first_nbytes": 6 * LARGE, "cpu_nbytes": 3 * LARGE, "disk_nbytes": 12 * LARGE}
    with rig(tmp_path, policy, device, **limits) as r:
        if rng.random() < 0.5:
            r.disk.fault = lambda block: Fault(delay_s=0.001)
        saved: list[tuple[Activation, Tensor]] = []
        for step in range(100):
            kind = rng.random()
            if kind < 0.5:
                try:
                    saved.append(r.save(rng.choice([5000, LARGE, LARGE + 4097, 2 * LARGE]), step))
                except OutOfMemoryError:
                    saved = saved[len(saved) // 2 :]
            elif saved and kind < 0.8:
                activation, expected = saved[rng.randrange(len(saved))]
                try:
                    assert torch.equal(activation.unpack(), expected), step
                except OutOfMemoryError:
                    saved = saved[: len(saved) // 2]
                del activation
            elif saved:
                saved.pop(rng.randrange(len(saved)))
            self_check(r)
        r.disk.heal()
        assert (r.activations.out_nbytes > 0) is (policy != "keep")
        while saved:
            activation, expected = saved.pop()
            assert torch.equal(activation.unpack(), expected)
            del activation
        r.check_empty()


def self_check(r: Rig) -> None:
    """The ledger holds, per tier, what is there and what is on its way there; the store what is on disk."""
    r.activations.collect()
    memories = list(r.activations._memories.values())
    for tier in r.ledger.tiers():
        here = [m for m in memories if m.tier == tier or m.target == tier]
        assert r.booked(tier) == sum(m.nbytes for m in here)
    on_disk = [m for m in memories if "disk" in (m.tier, m.target)]
    assert r.store is not None
    assert r.store.nbytes - r.store.free_nbytes == sum(-(-m.nbytes // 4096) * 4096 for m in on_disk)


# -- one storage, many tensors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_parts_of_a_storage_that_are_computed_in_place_one_by_one_are_saved_as_they_were_then(
    tmp_path: Path, device: str
) -> None:
    with rig(tmp_path, "disk", device) as r:
        saved, expected = [], []
        for part in torch.randn(64, 1024).unsafe_chunk(4, 1):  # each has a version counter of its own
            part.sigmoid_()
            saved.append(r.activations.add(part, Unchanged()))
            expected.append(part.clone())
        r.settle()
        for one, other in zip(saved, expected, strict=True):
            assert torch.equal(one.unpack(), other)


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_of_one_storage_are_booked_moved_and_brought_back_once(tmp_path: Path, device: str) -> None:
    with rig(tmp_path, "disk", device) as r:
        whole = torch.randn(64, 512)
        views = [whole, whole.t(), whole[3:, ::2], whole.view(torch.int32), whole[5]]
        expected = [view.clone() for view in views]
        saved = [r.activations.add(view, Unchanged()) for view in views]
        del whole, views
        assert r.booked(r.first) == 64 * 512 * 4 and r.activations.out_nbytes == 64 * 512 * 4
        r.settle()
        assert r.booked(r.first) == 0
        back = [activation.unpack() for activation in saved]
        assert r.activations.back_nbytes == 64 * 512 * 4 == r.booked(r.first)
        for one, other in zip(back, expected, strict=True):
            assert torch.equal(one, other) and one.stride() in (other.stride(), (512, 2), (1, 512))
        assert len({one.untyped_storage().data_ptr() for one in back}) == 1
        del saved[1:]
        r.activations.collect()
        assert r.booked(r.first) == 64 * 512 * 4, "one of them is left"
        saved.clear()
        r.check_empty()


def test_a_storage_at_an_address_that_was_used_before_is_another(tmp_path: Path) -> None:
    with rig(tmp_path, "disk") as r:
        saved, seen = [], set()
        for i in range(30):
            tensor = torch.full((LARGE,), i, dtype=torch.uint8)
            seen.add(tensor.data_ptr())
            saved.append(r.activations.add(tensor, Unchanged()))
            del tensor
            r.settle()
        assert len(seen) < 30, "no address came twice, so this shows nothing"
        assert all((activation.unpack() == i).all() for i, activation in enumerate(saved))


def test_a_tensor_changed_in_place_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    with rig(tmp_path, "disk") as r:
        activation = r.activations.add(torch.zeros(LARGE, dtype=torch.uint8), Changed())
        r.settle()
        with pytest.raises(RuntimeError, match="inplace"):
            activation.unpack()
        assert r.disk.reads() == []


# -- dying on the way --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", ["cpu", "disk"])
def test_an_owner_that_dies_while_its_bytes_leave(tmp_path: Path, policy: Policy, device: str) -> None:
    with rig(tmp_path, policy, device) as r:
        r.disk.fault = lambda block: Fault(delay_s=0.05)
        for i in range(3):
            activation, _ = r.save(2 * LARGE, i)
            del activation
            r.check_empty()
        kept, expected = r.save(LARGE, 9)
        assert torch.equal(kept.unpack(), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_an_owner_that_dies_while_its_bytes_come_back(tmp_path: Path, device: str) -> None:
    with rig(tmp_path, "disk", device) as r:
        saved = [r.save(LARGE, i) for i in range(3)]
        r.settle()
        r.disk.fault = lambda block: Fault(delay_s=0.05)
        assert torch.equal(saved[2][0].unpack(), saved[2][1])
        assert len(r.disk.reads()) == 3
        saved.clear()
        r.check_empty()


def test_a_tensor_that_was_unpacked_outlives_its_saved_self(tmp_path: Path) -> None:
    with rig(tmp_path, "disk") as r:
        activation, expected = r.save(LARGE, 0)
        early = activation.unpack()
        r.settle()
        late = activation.unpack()
        del activation
        r.check_empty()
        junk = [torch.zeros(LARGE, dtype=torch.uint8) for _ in range(8)]
        assert torch.equal(early, expected) and torch.equal(late, expected) and len(junk) == 8


# -- what fails --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_a_write_that_fails_surfaces_where_room_is_made_and_loses_nothing(
    tmp_path: Path, device: str, error: int
) -> None:
    with rig(tmp_path, "disk", device, first_nbytes=4 * LARGE) as r:
        r.disk.fail(write=True, error=error)
        saved = [r.save(LARGE, i) for i in range(2)]
        with pytest.raises(IOEngineError) as caught:
            for _ in range(2):
                r.settle()
        assert caught.value.errno == error
        for activation, expected in saved:
            assert torch.equal(activation.unpack(), expected)
        while r.activations._leaving:
            with pytest.raises(IOEngineError):
                r.settle()
        self_check(r)
        assert r.booked(r.first) == 2 * LARGE
        r.disk.heal()
        assert r.activations.make_room(2 * LARGE) and r.booked(r.first) == 0
        assert all(torch.equal(activation.unpack(), expected) for activation, expected in saved)
        saved.clear()
        del activation
        r.check_empty()


@pytest.mark.parametrize("device", DEVICES)
def test_a_read_that_fails_is_raised_to_who_asks_and_asking_again_reads_again(tmp_path: Path, device: str) -> None:
    with rig(tmp_path, "disk", device) as r:
        saved = [r.save(LARGE, i) for i in range(3)]
        r.settle()
        r.disk.fail(write=False)
        for _ in range(3):
            num_reads = len(r.disk.reads())
            with pytest.raises(IOEngineError):
                saved[2][0].unpack()
            assert len(r.disk.reads()) > num_reads
            self_check(r)
            assert r.booked(r.first) == 0
        r.disk.heal()
        assert all(torch.equal(activation.unpack(), expected) for activation, expected in reversed(saved))
        saved.clear()
        r.check_empty()


@pytest.mark.parametrize("device", DEVICES)
def test_a_read_ahead_that_fails_is_no_matter_until_its_own_tensor_is_asked_for(tmp_path: Path, device: str) -> None:
    with rig(tmp_path, "disk", device) as r:
        saved = [r.save(LARGE + 4096 * i, i) for i in range(3)]
        r.settle()
        r.disk.fault = lambda block: Fault(error=errno.EIO) if block.useful_nbytes == LARGE + 4096 else None
        for number in (2, 0):
            assert torch.equal(saved[number][0].unpack(), saved[number][1])
        with pytest.raises(IOEngineError):
            saved[1][0].unpack()
        self_check(r)
        r.disk.heal()
        assert torch.equal(saved[1][0].unpack(), saved[1][1])
        saved.clear()
        r.check_empty()


@pytest.mark.parametrize("device", DEVICES)
def test_a_move_that_fails_for_a_dead_owner_is_nobodys_error(tmp_path: Path, device: str) -> None:
    with rig(tmp_path, "disk", device) as r:
        r.disk.fail(write=True)
        saved = [r.save(LARGE, i) for i in range(2)]
        saved.clear()
        r.check_empty()
        r.disk.heal()
        saved = [r.save(LARGE, i) for i in range(3)]
        r.settle()
        r.disk.fault = lambda block: Fault(error=errno.EIO) if len(r.disk.reads()) > 1 else None
        assert torch.equal(saved[2][0].unpack(), saved[2][1])
        saved.clear()
        r.check_empty()


def test_a_disk_that_never_answers_keeps_what_it_may_still_write_to(tmp_path: Path) -> None:
    with rig(tmp_path, "disk", timeout_s=0.2) as r:
        activation, _ = r.save(LARGE, 0)
        r.settle()
        r.disk.fault = lambda block: Fault(stuck=True)
        with pytest.raises(IOEngineError) as caught:
            activation.unpack()
        assert caught.value.errno == errno.ETIMEDOUT
        del caught
        gc.collect()
        storages = [t.untyped_storage() for t in gc.get_objects() if type(t) is Tensor and t.device.type == "cpu"]
        ranges = [(storage.data_ptr(), storage.nbytes()) for storage in storages]
        assert r.engine.abandoned()
        for _, address, nbytes in r.engine.abandoned():
            assert any(start <= address and address + nbytes <= start + size for start, size in ranges)


# -- the end -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", POLICIES)
def test_close_brings_everything_back_wherever_it_was(tmp_path: Path, policy: Policy, device: str) -> None:
    limits = {"first_nbytes": 20 * LARGE} if policy == "keep" else {"first_nbytes": 4 * LARGE, "cpu_nbytes": 3 * LARGE}
    with rig(tmp_path, policy, device, **limits) as r:
        saved = [r.save(LARGE, i) for i in range(9)]
        assert (r.activations.out_nbytes > 0) is (policy != "keep")
        assert torch.equal(saved[8][0].unpack(), saved[8][1])
        r.activations.close()
        r.activations.close()
        assert r.store is not None
        assert r.store.free_nbytes == r.store.nbytes
        assert r.ledger.used("cpu") == 0 and r.booked(r.first) == 0
    for activation, expected in saved:
        assert torch.equal(activation.unpack(), expected), "without the store, the engine and the device"
    del activation
    saved.clear()
    assert r.ledger.used(r.first) == 0


@pytest.mark.parametrize("device", DEVICES)
def test_close_brings_back_what_it_can_when_the_disk_fails(tmp_path: Path, device: str) -> None:
    with rig(tmp_path, "disk", device) as r:
        saved = [r.save(LARGE + 4096 * i, i) for i in range(4)]
        r.settle()
        r.disk.fault = lambda block: Fault(error=errno.EIO) if block.useful_nbytes == LARGE + 4096 else None
        with pytest.raises(IOEngineError):
            r.activations.close()
        for number in (0, 2, 3):
            assert torch.equal(saved[number][0].unpack(), saved[number][1])
        assert r.ledger.used(r.first) == 0


# -- the device --------------------------------------------------------------------------------------------------------


def test_another_threads_copy_does_not_take_an_adoption_away() -> None:
    device = EmulatedDevice(1 << 20)
    arena = device.allocate(4096, name="slot")
    host, theirs = torch.ones(4096, dtype=torch.uint8), torch.zeros(4096, dtype=torch.uint8)
    try:
        device.adopt((theirs.data_ptr(), 4096))
        device.copy(arena.address, host.data_ptr(), 4096, to_device=True)  # weights that a completion streams
        device.copy(theirs.data_ptr(), host.data_ptr(), 4096, to_device=True).synchronize()
        assert torch.equal(theirs, host)
    finally:
        arena.close()
        device.close()
