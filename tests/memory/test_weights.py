"""Weight chunks: found as they lie, moved between their places, leased and brought home, and nothing lost."""

from __future__ import annotations

import errno
import gc
import itertools
import random
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hetero.io.backends.faulty import Fault
from hetero.io.errors import IOEngineError, OutOfMemoryError
from hetero.memory.homes import WEIGHTS
from hetero.memory.onlookers import Onlookers
from hetero.memory.weights import Place, WeightChunk, find_chunks, span_of
from tests.interrupting import InterruptAt
from tests.memory.weights_rig import CPU, PLACES, bytes_of, like, parameter_at, weights_rig

pytestmark = pytest.mark.usefixtures("no_leaks")
DEVICES = tuple(PLACES)


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Collect no garbage of torch's own after each test."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def odd_parameters() -> list[tuple[str, nn.Parameter]]:
    """Parameters at every kind of address, of several dtypes, shapes and strides."""
    return [
        ("plain", parameter_at(0, (64, 96), seed=1)),
        ("at 8 of 64", parameter_at(8, (50, 30), seed=2)),
        ("at 60 of 64", parameter_at(60, (1025,), seed=3)),
        ("transposed", parameter_at(4, (40, 70), stride=(1, 40), seed=4)),
        ("with gaps", parameter_at(16, (20, 30), stride=(64, 2), seed=5)),
        ("channels last", parameter_at(32, (8, 4, 3, 3), stride=(36, 1, 12, 4), seed=6)),
        ("bf16", parameter_at(2, (33, 65), dtype=torch.bfloat16, seed=7)),
        ("int8", parameter_at(63, (5000,), dtype=torch.int8, seed=8)),
        ("scalar", parameter_at(12, (), seed=9)),
    ]


def lease(chunk: WeightChunk) -> torch.Tensor:
    """Show a copy of the home, as a lease does, and return the copy."""
    slot = torch.empty(chunk.residue + chunk.nbytes + 64, dtype=torch.uint8)[64:][: chunk.residue + chunk.nbytes]
    base = slot[chunk.residue :]
    base.copy_(chunk.base)
    chunk.open(chunk.views_of(base))
    return base


# -- finding -----------------------------------------------------------------------------------------------------------


def test_each_parameter_is_a_chunk_in_the_order_of_the_parameters() -> None:
    named = odd_parameters()
    chunks = find_chunks(named, CPU, small_nbytes=1)
    assert [chunk.name for chunk in chunks] == [name for name, _ in named]
    assert [chunk.chunk_id for chunk in chunks] == list(range(len(named)))
    for chunk, (_, parameter) in zip(chunks, named, strict=True):
        start, end = span_of(parameter)
        assert (chunk.nbytes, chunk.residue) == (end - start, parameter.data_ptr() % 64)
        assert chunk.base.data_ptr() == parameter.data_ptr() and chunk.views[0].parameter is parameter


def test_tied_and_overlapping_parameters_share_a_chunk_and_neighbours_do_not() -> None:
    buffer = torch.arange(4000, dtype=torch.float32)
    first, overlapping = nn.Parameter(buffer[:1000]), nn.Parameter(buffer[900:2000])
    neighbour = nn.Parameter(buffer[2000:3000].view(50, 20).t())
    alone = nn.Parameter(torch.zeros(1000))
    named = [
        ("alone", alone),
        ("neighbour", neighbour),
        ("overlapping", overlapping),
        ("first", first),
        ("tied", first),
    ]
    chunks = find_chunks(named, CPU, small_nbytes=1)
    members = [[view.parameter for view in chunk.views] for chunk in chunks]
    assert [[id(p) for p in group] for group in members] == [
        [id(alone)], [id(neighbour)], [id(first), id(overlapping)]
    ]  # fmt: skip
    assert [chunk.nbytes for chunk in chunks] == [4000, 4000, 8000]
    with torch.no_grad():
        overlapping[:100] = -1.0
    assert bytes_of(chunks[2].home[0]) == bytes_of(first) and (first[900:] == -1).all()


@pytest.mark.parametrize("seed", range(20))
def test_chunks_are_the_connected_runs_of_each_storage(seed: int) -> None:
    rng = random.Random(seed)
    buffers = [torch.zeros(600), torch.zeros(600)]
    named: list[tuple[str, nn.Parameter]] = []
    for i in range(14):
        start, step, size = rng.randrange(400), rng.choice([1, 1, 2, 3]), rng.randrange(1, 60)
        data = torch.as_strided(rng.choice(buffers), (size,), (step,), start)
        named.append((f"p{i}", nn.Parameter(data)))
    groups = [{name} for name, _ in named]
    for (a, p), (b, q) in itertools.combinations(named, 2):
        (start_a, end_a), (start_b, end_b) = span_of(p), span_of(q)
        is_same = p.untyped_storage().data_ptr() == q.untyped_storage().data_ptr()
        if is_same and start_a < end_b and start_b < end_a:
            joined = next(group for group in groups if a in group) | next(group for group in groups if b in group)
            groups = [group for group in groups if not group & joined] + [joined]
    names = {id(parameter): name for name, parameter in named}
    chunks = find_chunks(named, CPU, small_nbytes=1)
    found = [{names[id(view.parameter)] for view in chunk.views} for chunk in chunks]
    assert sorted(map(sorted, found)) == sorted(map(sorted, groups))
    firsts = [min(int(name[1:]) for name in group) for group in found]
    assert firsts == sorted(firsts)


class Subclass(torch.Tensor):
    pass


def test_what_is_small_or_has_no_plain_bytes_of_its_own_stays() -> None:
    shared = torch.zeros(2000)
    shared.share_memory_()  # type: ignore[no-untyped-call]
    with torch.inference_mode():
        inference = nn.Parameter(torch.zeros(2000), requires_grad=False)
    stays = {
        "small": nn.Parameter(torch.zeros(1023)),
        "empty": nn.Parameter(torch.zeros(0, 5000)),
        "meta": nn.Parameter(torch.zeros(2000, device="meta")),
        "sparse": nn.Parameter(torch.eye(2000).to_sparse()),
        "subclass": nn.Parameter(torch.zeros(2000).as_subclass(Subclass)),
        "shared": nn.Parameter(shared),
        "inference": inference,
        "conjugate": nn.Parameter(torch.zeros(2000, dtype=torch.complex64).conj()),
    }
    moves = nn.Parameter(torch.zeros(1024))
    chunks = find_chunks([*stays.items(), ("moves", moves)], CPU, small_nbytes=4096)
    assert [chunk.name for chunk in chunks] == ["moves"]


def test_parameters_of_a_storage_that_cannot_be_viewed_together_stay() -> None:
    storage = torch.zeros(4000, dtype=torch.uint8).untyped_storage()
    floats = nn.Parameter(torch.empty(0).set_(storage, 1, (500,), (1,)))
    odd = nn.Parameter(torch.empty(0, dtype=torch.uint8).set_(storage, 3, (100,), (1,)), requires_grad=False)
    assert find_chunks([("floats", floats), ("odd", odd)], CPU, small_nbytes=1) == []
    assert len(find_chunks([("floats", floats)], CPU, small_nbytes=1)) == 1


# -- moving ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_a_round_trip_through_every_place_keeps_bytes_and_books_both_ends_while_it_moves(
    tmp_path: Path, device: str
) -> None:
    with weights_rig(tmp_path, odd_parameters(), device) as rig:
        for chunk in rig.chunks:
            for goal in (*PLACES[device], *reversed(PLACES[device])):
                before, nbytes = chunk.place, chunk.nbytes
                rig.events.clear()
                rig.homes.move(chunk, goal)
                assert chunk.place is goal
                rig.check()
                taken = [] if goal in (before, Place.DISK) else [("take", rig.homes.tier_of(goal), nbytes)]
                given = [] if before in (goal, Place.DISK) else [("give", rig.homes.tier_of(before), nbytes)]
                assert rig.events == taken + given
        assert rig.homes.num_moves >= 2 * len(rig.chunks)
        rig.homes.restore()
        rig.check_values_and_addresses()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(3))
def test_any_walk_with_any_writes_between_keeps_what_was_written(tmp_path: Path, device: str, seed: int) -> None:
    rng = random.Random(seed)
    with weights_rig(tmp_path, odd_parameters(), device) as rig:
        for _ in range(120):
            if rng.random() < 0.5:
                rig.write(rng.choice(rig.named)[0], rng)
            else:
                rig.homes.move(rng.choice(rig.chunks), rng.choice(PLACES[device]))
            rig.check()
        assert {chunk.place for chunk in rig.chunks} == set(PLACES[device])
        rig.homes.restore()
        rig.check_values_and_addresses()
        assert not rig.homes._arenas


@pytest.mark.parametrize("device", DEVICES)
def test_overlapping_parameters_move_as_one(tmp_path: Path, device: str) -> None:
    buffer = torch.arange(6000, dtype=torch.float32)
    named = [("a", nn.Parameter(buffer[2:3000])), ("b", nn.Parameter(buffer[1000:5000].view(40, 100).t()))]
    with weights_rig(tmp_path, named, device) as rig:
        (chunk,) = rig.chunks
        for place in (Place.DISK, Place.FIRST, Place.DISK):
            rig.homes.move(chunk, place)
            with torch.no_grad():
                named[0][1][1000] += 1.0
                named[1][1][3, 0] -= 2.0
            assert bytes_of(named[0][1][998:]) == bytes_of(named[1][1].t().flatten()[:2000])
        assert named[0][1][1000] == 1002 + 3 and named[1][1][3, 0] == 1003 - 6


@pytest.mark.parametrize("device", DEVICES)
def test_values_put_in_place_of_a_parameters_data_move_with_it(tmp_path: Path, device: str) -> None:
    with weights_rig(tmp_path, odd_parameters(), device) as rig:
        for number, place in enumerate((Place.DISK, Place.FIRST, Place.DISK)):
            for name, parameter in rig.named:
                parameter.data = like(parameter).fill_(number + 1)
                rig.values[name].fill_(number + 1)
            for chunk in rig.chunks:
                rig.homes.move(chunk, place)
            rig.check_values_and_addresses()
            rig.check_ledger()
        for name, parameter in rig.named:
            parameter.data = like(parameter).fill_(9)
            rig.values[name].fill_(9)
        rig.homes.restore()
        rig.check_values()


@pytest.mark.parametrize("device", DEVICES)
def test_a_parameter_that_got_another_geometry_is_left_alone_by_moves_and_by_the_end(
    tmp_path: Path, device: str
) -> None:
    with weights_rig(tmp_path, odd_parameters()[:3], device) as rig:
        rig.homes.move(rig.chunks[0], Place.DISK)
        for _, parameter in rig.named:
            parameter.data = parameter.data.to(torch.float64)
        rig.homes.move(rig.chunks[1], Place.DISK)
        for name, parameter in rig.named:
            assert parameter.dtype == torch.float64
            assert torch.equal(parameter, rig.values[name].double()), name
        rig.homes.restore()
        for name, parameter in rig.named:
            assert parameter.dtype == torch.float64
            assert torch.equal(parameter, rig.values[name].double()), name


@pytest.mark.parametrize("device", DEVICES)
def test_restore_brings_memory_of_the_models_own_that_outlives_everything(tmp_path: Path, device: str) -> None:
    with weights_rig(tmp_path, odd_parameters(), device) as rig:
        for number, chunk in enumerate(rig.chunks):
            rig.homes.move(chunk, PLACES[device][number % len(PLACES[device])])
        told: list[int] = []
        rig.homes.restore(told.append)
        assert told[-1] == sum(chunk.nbytes for chunk in rig.chunks) and told == sorted(told)
        rig.check_values_and_addresses()
        folder = rig.store.folder if rig.store is not None else tmp_path
    gc.collect()
    assert not folder.exists()
    rig.check_values_and_addresses()
    assert "scratch.bin" not in Path("/proc/self/maps").read_text()


# -- the mapped file ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "threads", "buffered"])
def test_a_mapped_home_and_direct_requests_see_each_others_writes_in_any_order(tmp_path: Path, backend: str) -> None:
    named = [(f"p{i}", parameter_at(residue, (9000 + 777 * i,), seed=i)) for i, residue in enumerate((0, 8, 60))]
    rng = random.Random(5)
    with weights_rig(tmp_path, named, backend=backend) as rig:
        for chunk in rig.chunks:
            rig.homes.move(chunk, Place.DISK)
        truth = [chunk.base.numpy().copy() for chunk in rig.chunks]
        mapped = [chunk.base.numpy() for chunk in rig.chunks]
        for step in range(400):
            number = rng.randrange(len(rig.chunks))
            chunk, expected = rig.chunks[number], truth[number]
            start = rng.randrange(chunk.nbytes)
            nbytes = min(rng.choice([1, 7, 64, 4096, 9000, 40_000]), chunk.nbytes - start)
            new = np.full(nbytes, step % 251, np.uint8)
            match rng.randrange(4):
                case 0:
                    mapped[number][start : start + nbytes] = expected[start : start + nbytes] = new
                case 1:
                    rig.direct(chunk, start, new)
                    expected[start : start + nbytes] = new
                case 2:
                    assert np.array_equal(rig.direct(chunk, start, nbytes), expected[start : start + nbytes]), step
                case 3:
                    assert np.array_equal(mapped[number], expected), step
        for number, chunk in enumerate(rig.chunks):
            assert np.array_equal(rig.direct(chunk, 0, chunk.nbytes), truth[number])
            assert np.array_equal(mapped[number], truth[number])


def test_writing_one_home_leaves_its_neighbours_in_the_file_alone(tmp_path: Path) -> None:
    named = [(f"p{i}", parameter_at(8 * i, (700 + i,), seed=i)) for i in range(6)]
    with weights_rig(tmp_path, named) as rig:
        for chunk in rig.chunks:
            rig.homes.move(chunk, Place.DISK)
        for number, (name, parameter) in enumerate(rig.named):
            parameter.data.fill_(float(number))
            rig.values[name].fill_(float(number))
            rig.homes.move(rig.chunks[number], Place.FIRST)
            rig.homes.move(rig.chunks[number], Place.DISK)
            rig.check()


# -- leases ------------------------------------------------------------------------------------------------------------


def test_what_is_written_to_a_lease_is_home_after_the_last_of_nested_ones(tmp_path: Path) -> None:
    with weights_rig(tmp_path, odd_parameters()[:2]) as rig:
        chunk, parameter = rig.chunks[0], rig.named[0][1]
        rig.homes.move(chunk, Place.DISK)
        home = parameter.data_ptr()
        slot = lease(chunk)
        chunk.open([torch.empty(0)])
        assert parameter.data_ptr() == slot.data_ptr()
        with torch.no_grad():
            parameter.mul_(2.0)
        chunk.close()
        assert parameter.data_ptr() == slot.data_ptr()
        assert bytes_of(chunk.home[0]) == bytes_of(rig.values["plain"])
        chunk.close()
        assert parameter.data_ptr() == home
        rig.values["plain"] *= 2.0
        rig.check()


@pytest.mark.parametrize("write", ["in place", "data", "parameter swap", "nothing"])
def test_a_lease_writes_home_what_was_changed_and_nothing_else(write: str) -> None:
    first, second = (nn.Parameter(torch.arange(3000.0)) for _ in range(2))
    chunk, other = find_chunks([("first", first), ("second", second)], CPU, small_nbytes=1)
    slot = lease(chunk)
    lease(other)
    with torch.no_grad():
        if write == "in place":
            first.add_(1.0)
        elif write == "data":
            first.data = torch.arange(3000.0) + 1.0
        elif write == "parameter swap":
            first.set_((torch.arange(3000.0) + 1.0).untyped_storage(), 0, (3000,), (1,))
    versions = [chunk.home[0]._version, other.home[0]._version]
    chunk.close()
    other.close()
    assert other.home[0]._version == versions[1], "a clean home was written"
    assert (chunk.home[0]._version > versions[0]) is (write != "nothing")
    assert first.data_ptr() == chunk.base.data_ptr() != slot.data_ptr()
    assert torch.equal(first, torch.arange(3000.0) + (write != "nothing"))
    assert torch.equal(second, torch.arange(3000.0))


def test_a_parameter_that_got_another_geometry_in_a_lease_keeps_it() -> None:
    first, second = nn.Parameter(torch.arange(3000.0)), nn.Parameter(torch.arange(2000.0))
    chunk, other = find_chunks([("first", first), ("second", second)], CPU, small_nbytes=1)
    lease(chunk)
    first.data = first.data.half()
    chunk.close()
    assert first.dtype == torch.float16 and not chunk.adopt()
    assert other.adopt()
    assert torch.equal(first, torch.arange(3000.0).half())


def test_new_values_are_taken_home_and_copies_of_the_old_are_known_to_be_stale() -> None:
    parameter = nn.Parameter(torch.arange(3000.0))
    (chunk,) = find_chunks([("p", parameter)], CPU, small_nbytes=1)
    assert chunk.adopt() and parameter.data_ptr() == chunk.base.data_ptr()
    chunk.version = chunk.counter()
    parameter.data = torch.zeros(3000)
    assert chunk.adopt() and not chunk.away
    assert parameter.data_ptr() == chunk.base.data_ptr() and not parameter.any()
    assert chunk.version != chunk.counter()


class Saved:
    """Stands for what autograd keeps."""


@pytest.mark.parametrize("who", ["a backup of the old values", "the owner of the new values", "a graph", "a geometry"])
def test_a_replaced_parameter_is_away_while_somebody_could_tell_the_difference(who: str) -> None:
    parameter = nn.Parameter(torch.arange(3000.0))
    (chunk,) = find_chunks([("p", parameter)], CPU, small_nbytes=1)
    new = torch.ones(3000) if who != "a geometry" else torch.ones(30, 100)
    old = parameter.data
    graph = Saved()
    if who == "a graph":
        chunk.refer(graph)
    parameter.data = new
    if who != "a backup of the old values":
        del old
    if who != "the owner of the new values":
        del new
    for _ in range(2):
        assert not chunk.adopt() and chunk.away == {0}
        assert parameter.data_ptr() != chunk.base.data_ptr() and (parameter == 1).all()
        assert torch.equal(chunk.home[0], torch.arange(3000.0))
    old = new = torch.empty(0)
    del graph
    assert chunk.adopt() is (who != "a geometry")
    parameter.data = chunk.home[0]
    assert chunk.adopt() and not chunk.away


def test_replacing_one_of_two_overlapping_parameters_leaves_the_other() -> None:
    buffer = torch.arange(3000.0)
    first, second = nn.Parameter(buffer[:2000]), nn.Parameter(buffer[1000:])
    (chunk,) = find_chunks([("first", first), ("second", second)], CPU, small_nbytes=1)
    first.data = torch.zeros(2000)
    assert not chunk.adopt() and chunk.away == {0}
    chunk.show_home()
    assert not first.any() and torch.equal(second, torch.arange(1000.0, 3000.0))


@pytest.mark.parametrize("device", DEVICES)
def test_a_home_on_disk_stays_there_while_somebody_else_looks_at_it(tmp_path: Path, device: str) -> None:
    with weights_rig(tmp_path, odd_parameters()[:2], device) as rig:
        for chunk in rig.chunks:
            rig.homes.move(chunk, Place.DISK)
        view = rig.named[0][1].detach()
        for chunk in rig.chunks:
            rig.homes.move(chunk, Place.FIRST)
        assert [chunk.place for chunk in rig.chunks] == [Place.DISK, Place.FIRST]
        rig.check()
        view.zero_()
        rig.values["plain"].zero_()
        rig.check()
        del view
        rig.homes.move(rig.chunks[0], Place.FIRST)
        assert rig.chunks[0].place is Place.FIRST


@pytest.mark.parametrize("device", DEVICES)
def test_a_home_in_memory_stays_there_while_somebody_else_looks_at_it(tmp_path: Path, device: str) -> None:
    with weights_rig(tmp_path, odd_parameters()[:2], device) as rig:
        before = rig.chunks[0].place
        view = rig.named[0][1].detach()
        for place in PLACES[device]:
            for chunk in rig.chunks:
                rig.homes.move(chunk, place)
            assert [chunk.place for chunk in rig.chunks] == [before, place]
            assert view.data_ptr() == rig.named[0][1].data_ptr()
            rig.check()
        del view
        rig.homes.move(rig.chunks[0], Place.DISK)
        assert rig.chunks[0].place is Place.DISK
        rig.check()


def test_who_looks_at_a_storage_of_several_chunks_is_told_from_the_models_own() -> None:
    whole = torch.zeros(6000)
    named = [(f"p{i}", nn.Parameter(whole[2000 * i : 2000 * i + 1500])) for i in range(3)]
    buffer = torch.empty(0).set_(whole.untyped_storage(), 1500, (10,), (1,))  # a slice would keep `whole`
    chunks = find_chunks(named, CPU, small_nbytes=1)
    onlookers = Onlookers(chunks, [buffer])
    assert all(onlookers.is_watched(chunk) for chunk in chunks), "at `whole`"
    del whole
    assert not any(onlookers.is_watched(chunk) for chunk in chunks)
    slot = lease(chunks[0])
    assert not any(onlookers.is_watched(chunk) for chunk in chunks), "a parameter that shows a slot is no onlooker"
    chunks[0].close()
    assert slot.numel() == chunks[0].nbytes
    view = named[2][1].detach()
    assert all(onlookers.is_watched(chunk) for chunk in chunks)
    del view
    chunks[1].rehome(torch.zeros(6000, dtype=torch.uint8), Place.FIRST)
    assert not any(onlookers.is_watched(chunk) for chunk in chunks)
    view = named[1][1].detach()
    assert [onlookers.is_watched(chunk) for chunk in chunks] == [False, True, False]
    del view


def test_a_run_that_has_ended_looks_at_nothing(tmp_path: Path) -> None:
    parameters = odd_parameters()[:2]
    with weights_rig(tmp_path, parameters) as rig:
        rig.homes.move(rig.chunks[0], Place.DISK)
        rig.homes.restore()
        rig.check_values_and_addresses()
        again = find_chunks(parameters, CPU, small_nbytes=1)
        assert not any(Onlookers(again, []).is_watched(chunk) for chunk in again)
    rig.check_values()


def test_adopting_in_the_middle_of_a_lease_changes_nothing() -> None:
    parameter = nn.Parameter(torch.arange(3000.0))
    (chunk,) = find_chunks([("p", parameter)], CPU, small_nbytes=1)
    slot = lease(chunk)
    version = chunk.home[0]._version
    assert chunk.adopt()
    assert parameter.data_ptr() == slot.data_ptr() and chunk.home[0]._version == version
    chunk.close()


def test_a_lease_that_was_lost_shows_the_home_again() -> None:
    parameter = nn.Parameter(torch.arange(3000.0))
    (chunk,) = find_chunks([("p", parameter)], CPU, small_nbytes=1)
    lease(chunk)
    lease(chunk)
    chunk.end_leases()
    assert parameter.data_ptr() == chunk.base.data_ptr() and chunk.num_open == 0
    lease(chunk)
    chunk.close()
    assert torch.equal(parameter, torch.arange(3000.0))


def test_moving_a_home_under_an_open_lease_shows_it_when_the_lease_ends(tmp_path: Path) -> None:
    with weights_rig(tmp_path, odd_parameters()[:2]) as rig:
        chunk, parameter = rig.chunks[1], rig.named[1][1]
        slot = lease(chunk)
        with torch.no_grad():
            parameter.add_(1.0)
        rig.values["at 8 of 64"] += 1.0
        rig.homes.move(chunk, Place.DISK)
        assert parameter.data_ptr() == slot.data_ptr()
        chunk.close()
        assert parameter.data_ptr() == chunk.base.data_ptr()
        rig.check()


# -- what fails --------------------------------------------------------------------------------------------------------


class Disk:
    fault: Fault | None = None
    is_write: bool | None = None

    def __call__(self, block: Any) -> Fault | None:
        return self.fault if self.is_write in (None, block.write) else None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_write", [True, False], ids=["write", "read"])
@pytest.mark.parametrize(
    "fault",
    [Fault(error=errno.EIO), Fault(error=errno.ENOSPC), Fault(short_nbytes=4096)],
    ids=["EIO", "ENOSPC", "short"],
)
def test_a_request_that_fails_leaves_the_chunk_where_it_was(
    tmp_path: Path, device: str, is_write: bool, fault: Fault
) -> None:
    disk = Disk()
    with weights_rig(tmp_path, odd_parameters()[:2], device, fault=disk) as rig:
        chunk = rig.chunks[0]
        before, goal = (Place.FIRST, Place.DISK) if is_write else (Place.DISK, Place.FIRST)
        rig.homes.move(chunk, before)
        address, num_moves = rig.named[0][1].data_ptr(), rig.homes.num_moves
        disk.fault, disk.is_write = fault, is_write
        for _ in range(3):
            with pytest.raises(IOEngineError):
                rig.homes.move(chunk, goal)
            assert (chunk.place, rig.homes.num_moves, rig.named[0][1].data_ptr()) == (before, num_moves, address)
            rig.check()
        disk.fault = None
        rig.homes.move(chunk, goal)
        assert chunk.place is goal
        rig.check()


@pytest.mark.parametrize("device", DEVICES)
def test_a_tier_without_room_leaves_the_chunk_where_it_was(tmp_path: Path, device: str) -> None:
    with weights_rig(tmp_path, odd_parameters(), device) as rig:
        chunk = rig.chunks[0]
        rig.homes.move(chunk, Place.DISK)
        tier = rig.homes.tier_of(Place.FIRST)
        blocked = rig.ledger.free(tier) - chunk.nbytes + 1
        with rig.ledger.hold(tier, "others", blocked), pytest.raises(OutOfMemoryError, match=f"the {tier} budget"):
            rig.homes.move(chunk, Place.FIRST)
        rig.check()
        with rig.ledger.hold(tier, "others", blocked - 1):
            rig.homes.move(chunk, Place.FIRST)
        rig.check()


def test_a_device_without_room_leaves_the_chunk_where_it_was(tmp_path: Path) -> None:
    with weights_rig(tmp_path, odd_parameters(), "emulated", gpu_nbytes=8192) as rig:
        for place in (Place.CPU, Place.DISK):
            rig.homes.move(rig.chunks[0], place)
            with pytest.raises(OutOfMemoryError, match="emulated GPU"):
                rig.homes.move(rig.chunks[0], Place.FIRST)
            assert rig.chunks[0].place is place
            rig.check()
        assert rig.device.memory_info() == (8192, 8192)


@pytest.mark.parametrize("device", DEVICES)
def test_a_disk_that_fails_at_the_end_takes_nothing_but_the_memory(tmp_path: Path, device: str) -> None:
    disk = Disk()
    with weights_rig(tmp_path, odd_parameters(), device, fault=disk) as rig:
        for number, chunk in enumerate(rig.chunks):
            rig.homes.move(chunk, PLACES[device][number % len(PLACES[device])])
        on_disk = [chunk for chunk in rig.chunks if chunk.place is Place.DISK]
        disk.fault, disk.is_write = Fault(error=errno.EIO), False
        with pytest.raises(IOEngineError):
            rig.homes.restore()
        rig.check_values_and_addresses()
        assert [chunk for chunk in rig.chunks if chunk.place is Place.DISK] == on_disk and not rig.homes._arenas
        disk.fault = None
        rig.homes.restore()
        rig.check_values_and_addresses()
    rig.check_values()


def test_a_disk_that_never_answers_keeps_what_it_may_still_write_to(tmp_path: Path) -> None:
    disk = Disk()
    with weights_rig(tmp_path, odd_parameters()[:1], fault=disk, timeout_s=0.2) as rig:
        rig.homes.move(rig.chunks[0], Place.DISK)
        disk.fault = Fault(stuck=True)
        with pytest.raises(IOEngineError) as caught:
            rig.homes.move(rig.chunks[0], Place.FIRST)
        assert caught.value.errno == errno.ETIMEDOUT
        del caught
        rig.check()
        gc.collect()
        alive = [t.untyped_storage() for t in gc.get_objects() if type(t) is torch.Tensor and t.device == CPU]
        ranges = [(storage.data_ptr(), storage.nbytes()) for storage in alive]
        assert rig.engine.abandoned()
        for _, address, nbytes in rig.engine.abandoned():
            assert any(start <= address and address + nbytes <= start + size for start, size in ranges)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("goal", [Place.DISK, Place.FIRST], ids=lambda place: place.value)
def test_an_interrupt_while_the_disk_works_leaves_the_chunk_where_it_was(
    tmp_path: Path, device: str, goal: Place
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    disk = Disk()
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        with weights_rig(tmp_path, odd_parameters()[:2], device, fault=disk) as rig:
            chunk = rig.chunks[0]
            before = Place.FIRST if goal is Place.DISK else Place.DISK
            rig.homes.move(chunk, before)
            disk.fault = Fault(delay_s=0.2)
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(KeyboardInterrupt):
                rig.homes.move(chunk, goal)
            assert chunk.place is before and rig.engine.stats().in_flight == 0
            rig.check()
            disk.fault = None
            rig.homes.move(chunk, goal)
            rig.check()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it may hit an arena's destructor
@pytest.mark.parametrize("device", DEVICES)
def test_an_interrupt_at_any_moment_loses_no_weight_and_leaves_nothing_in_flight(tmp_path: Path, device: str) -> None:
    with weights_rig(tmp_path, odd_parameters()[:1], device) as rig:
        (chunk,) = rig.chunks
        gc.collect()
        gc.freeze()
        try:
            for number in itertools.count(1, 4):
                gc.collect()  # what a traceback still looks at does not move
                rig.homes.move(chunk, Place.FIRST)
                assert chunk.place is Place.FIRST
                interrupter = InterruptAt(number)
                with suppress(KeyboardInterrupt), interrupter:
                    rig.homes.move(chunk, Place.DISK)
                    rig.homes.move(chunk, Place.FIRST)
                rig.check_values_and_addresses()
                assert rig.engine.stats().in_flight == 0 and not rig.engine.abandoned()
                rig.renew_ledger()  # it can be interrupted amid its own arithmetic
                if interrupter.num_seen < number:
                    break
        finally:
            gc.unfreeze()
        assert number > 100


def test_without_a_disk_tier_there_is_nowhere_to_go(tmp_path: Path) -> None:
    with weights_rig(tmp_path, odd_parameters(), "emulated", has_disk=False) as rig:
        assert not rig.homes.has_disk and all(chunk.place is Place.CPU for chunk in rig.chunks)
        for chunk in rig.chunks:
            rig.homes.move(chunk, Place.FIRST)
        rig.check()
        assert list(tmp_path.iterdir()) == []
        rig.homes.restore()
        rig.check_values()


def test_what_was_not_booked_yet_is_not_given_back_when_it_leaves(tmp_path: Path) -> None:
    with weights_rig(tmp_path, odd_parameters()[:2]) as rig:
        rig.ledger.give("cpu", WEIGHTS, rig.chunks[0].nbytes)
        rig.homes.move(rig.chunks[0], Place.DISK, is_booked=False)
        rig.check()


def test_extents_are_the_stores_and_as_large_as_a_slot(tmp_path: Path) -> None:
    with weights_rig(tmp_path, odd_parameters()) as rig:
        assert rig.store is not None
        for chunk in rig.chunks:
            assert chunk.extent is not None and chunk.extent.nbytes == chunk.slot_nbytes
            assert chunk.slot_nbytes == -(-(chunk.residue + chunk.nbytes) // 4096) * 4096
            assert chunk.chunk().segments[0].offset == chunk.extent.offset
        assert rig.store.nbytes - rig.store.free_nbytes == sum(chunk.slot_nbytes for chunk in rig.chunks)
