"""The planner: optimal traffic, exact smallest budgets, even spreading, ring sizes."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.io.errors import ConfigError
from hetero.memory.placement import Placement
from hetero.memory.plan import (
    BudgetError,
    Budgets,
    ChunkSpec,
    Links,
    Moment,
    Plan,
    Trace,
    make_plan,
    make_residents,
    smallest_budgets,
)
from hetero.memory.plan_types import streamed_chunks, uses_of
from hetero.memory.simulate import simulate
from hetero.memory.spread import Place, spread_evenly
from hetero.memory.workload import Workload
from tests.memory.planning import (
    PAGE,
    budgets_for,
    chunk,
    free_of,
    links,
    one_each,
    optimum,
    ring_need,
    traffic_of,
    workloads,
)

both_tiers = pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])


def check_within_budgets(chunks: list[ChunkSpec], trace: Trace, budgets: Budgets, plan: Plan) -> None:
    gpu = budgets.gpu_nbytes is not None
    nbytes = {c.chunk_id: c.nbytes for c in chunks}
    first = plan.gpu_resident if gpu else plan.cpu_resident
    assert {c.chunk_id for c in chunks if c.pinned} <= first
    assert not plan.gpu_resident & plan.cpu_resident
    if budgets.gpu_nbytes is not None:
        assert sum(nbytes[i] for i in plan.gpu_resident) + plan.gpu_ring_nbytes <= budgets.gpu_nbytes
    assert sum(nbytes[i] for i in plan.cpu_resident) + plan.cpu_ring_nbytes <= budgets.cpu_nbytes
    streamed = {c.chunk_id: c for c in free_of(chunks, trace) if c.chunk_id not in first}
    assert set(plan.schedule) == set(streamed)
    assert ring_need(trace, streamed) <= (plan.gpu_ring_nbytes if gpu else plan.cpu_ring_nbytes)
    if gpu:
        assert all(c.nbytes <= plan.cpu_ring_nbytes for i, c in streamed.items() if i not in plan.cpu_resident)
        assert plan.cpu_ring_nbytes == 0 or set(streamed) - plan.cpu_resident
    assert bool(plan.schedule) == bool(plan.gpu_ring_nbytes if gpu else plan.cpu_ring_nbytes)


# -- traffic ----------------------------------------------------------------------------------------------------------


@both_tiers
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_traffic_is_the_optimum_of_all_choices(gpu: bool, data: st.DataObject) -> None:
    chunks, trace = data.draw(workloads(max_chunks=6 if gpu else 7))
    budgets = data.draw(budgets_for(chunks, gpu=gpu))
    expected = optimum(chunks, trace, budgets)
    if expected is None:
        with pytest.raises(BudgetError):
            make_residents(chunks, trace, budgets)
        return
    assert traffic_of(chunks, trace, make_residents(chunks, trace, budgets), gpu=gpu) == expected


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_filling_is_optimal_without_a_gpu_tier_also_when_not_every_choice_is_tried(data: st.DataObject) -> None:
    chunks, trace = data.draw(workloads(one_chunk_moments=True))
    budgets = data.draw(budgets_for(chunks, gpu=False))
    expected = optimum(chunks, trace, budgets)
    workload = Workload(chunks, trace)
    if expected is not None:
        placement = Placement(workload, budgets, max_tried=0)
        residents = placement.residents(placement.best())
        assert traffic_of(chunks, trace, residents, gpu=False) == expected


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_sharing_between_two_tiers_is_near_the_optimum_when_not_every_choice_is_tried(data: st.DataObject) -> None:
    chunks, trace = data.draw(workloads(max_chunks=6, one_chunk_moments=True, plain=True))
    budgets = data.draw(budgets_for(chunks, gpu=True))
    expected = optimum(chunks, trace, budgets)
    if expected is not None:
        placement = Placement(Workload(chunks, trace), budgets, max_tried=0)
        residents = placement.residents(placement.best())
        found = traffic_of(chunks, trace, residents, gpu=True)
        assert expected[0] <= found[0] <= expected[0] + max(c.nbytes for c in chunks)


@both_tiers
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_filling_accepts_whatever_fits_when_moments_use_several_chunks(gpu: bool, data: st.DataObject) -> None:
    chunks, trace = data.draw(workloads())
    budgets = data.draw(budgets_for(chunks, gpu=gpu))
    workload = Workload(chunks, trace)
    try:
        workload.check(budgets)
    except BudgetError:
        return
    placement = Placement(workload, budgets, max_tried=0)
    choice = placement.best()
    residents = placement.residents(choice)
    found = Placement(workload, budgets).best().traffic
    assert traffic_of(chunks, trace, residents, gpu=gpu) == choice.traffic
    assert choice.traffic >= found


@both_tiers
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_more_budget_never_gives_more_disk_traffic(gpu: bool, data: st.DataObject) -> None:
    chunks, trace = data.draw(workloads(max_chunks=5))
    least = smallest_budgets(chunks, trace, gpu=gpu)
    previous: int | None = None
    for num_pages in range(0, sum(c.nbytes for c in chunks) // PAGE + 1, 2):
        more = num_pages * PAGE
        gpu_nbytes = None if least.gpu_nbytes is None else least.gpu_nbytes + more
        budgets = Budgets(gpu_nbytes, least.cpu_nbytes + more)
        disk_nbytes, _ = traffic_of(chunks, trace, make_residents(chunks, trace, budgets), gpu=gpu)
        assert previous is None or disk_nbytes <= previous
        previous = disk_nbytes
    assert previous == 0


def test_disk_traffic_counts_before_the_gpu_link() -> None:
    # Beside the ring the gpu tier has room for one chunk, the cpu tier only stages. Chunk 2 is read most, chunk 1
    # crosses the link most (twice a pass).
    chunks = [chunk(0, 2), chunk(1, 2, read_nbytes=PAGE), chunk(2, 2, read_nbytes=5 * PAGE)]
    trace = Trace("decode", tuple(Moment(f"m{n}", (i,), 1.0) for n, i in enumerate([0, 1, 2, 1])))
    residents = make_residents(chunks, trace, Budgets(4 * PAGE, 2 * PAGE))
    assert residents.gpu_resident == {2}
    assert residents.cpu_resident == frozenset()


@pytest.mark.parametrize(
    ("sizes", "gpu_pages", "cpu_pages", "disk_pages"),
    [
        pytest.param([7, 7, 4, 4, 7, 24, 24, 7, 4], 75, 12, 18, id="room for one more on the gpu"),
        pytest.param([9, 8, 10, 9, 8, 9, 8, 9, 9, 8], 43, 34, 34, id="both tiers to the last page"),
    ],
)
def test_the_tiers_are_filled_as_one_room(sizes: list[int], gpu_pages: int, cpu_pages: int, disk_pages: int) -> None:
    # Filling the gpu tier first leaves chunks that do not fit the cpu tier as well.
    chunks = [chunk(i, size) for i, size in enumerate(sizes)]
    budgets = Budgets(gpu_pages * PAGE, cpu_pages * PAGE)
    residents = make_residents(chunks, one_each(len(sizes)), budgets)
    assert traffic_of(chunks, one_each(len(sizes)), residents, gpu=True)[0] == disk_pages * PAGE


@pytest.mark.parametrize("staged", [9, 17, 29, 30])
def test_many_sizes_do_not_hide_the_only_choice_that_fits(staged: int) -> None:
    # The gpu tier can just keep all that is larger than `staged` pages, the cpu tier just stage that.
    chunks = [chunk(i, i + 1) for i in range(30)]
    budgets = Budgets((sum(range(staged + 1, 31)) + staged) * PAGE, staged * PAGE)
    residents = make_residents(chunks, one_each(30), budgets)
    assert residents.gpu_resident == set(range(staged, 30))
    assert (residents.gpu_ring_nbytes, residents.cpu_ring_nbytes) == (staged * PAGE, staged * PAGE)


def test_keeping_the_largest_chunk_shrinks_the_ring() -> None:
    # Streaming the 6-page chunk takes a ring of 6; keeping it leaves 1 page, which is ring enough for the others.
    chunks = [chunk(0, 6), *(chunk(i, 1) for i in range(1, 6))]
    residents = make_residents(chunks, one_each(6), Budgets(None, 7 * PAGE))
    assert residents.cpu_resident == {0}
    assert residents.cpu_ring_nbytes == PAGE


def test_lookup_tables_become_resident_last() -> None:
    table = ChunkSpec(chunk_id=0, nbytes=4 * PAGE, read_nbytes=4 * PAGE, by_rows=True, row_read_nbytes=PAGE)
    chunks = [table, *(chunk(i, 2) for i in range(1, 5))]
    tight = make_plan(chunks, one_each(5), Budgets(None, 11 * PAGE), links(gpu=False))
    assert tight.cpu_resident == {1, 2, 3, 4}
    assert tight.schedule == ()
    assert tight.prediction.disk_nbytes == PAGE
    roomy = make_plan(chunks, one_each(5), Budgets(None, 12 * PAGE), links(gpu=False))
    assert roomy.cpu_resident == {0, 1, 2, 3, 4}
    assert roomy.prediction.disk_nbytes == 0


def test_a_table_that_the_gpu_cannot_hold_is_kept_on_the_cpu() -> None:
    table = ChunkSpec(chunk_id=0, nbytes=4 * PAGE, read_nbytes=4 * PAGE, by_rows=True, row_read_nbytes=PAGE)
    plan = make_plan([table, chunk(1)], one_each(2), Budgets(PAGE, 4 * PAGE), links(gpu=True))
    assert plan.gpu_resident == {1}
    assert plan.cpu_resident == {0}
    assert plan.schedule == ()


@both_tiers
def test_when_everything_fits_there_is_no_ring_and_nothing_to_stream(gpu: bool) -> None:
    chunks = [chunk(i, 1 + i % 3) for i in range(20)]
    total = sum(c.nbytes for c in chunks)
    plan = make_plan(chunks, one_each(20), Budgets(total if gpu else None, total), links(gpu=gpu))
    assert plan.schedule == ()
    assert plan.gpu_ring_nbytes == plan.cpu_ring_nbytes == 0
    assert plan.prediction.time_s == plan.prediction.bound_s == 20.0
    assert plan.prediction.bottleneck == "compute"


# -- budgets ----------------------------------------------------------------------------------------------------------


@both_tiers
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_smallest_budgets_work_and_one_page_less_does_not(gpu: bool, data: st.DataObject) -> None:
    chunks, trace = data.draw(workloads(max_chunks=6))
    least = smallest_budgets(chunks, trace, gpu=gpu)
    check_within_budgets(chunks, trace, least, make_plan(chunks, trace, least, links(gpu=gpu)))
    assert optimum(chunks, trace, least) is not None
    less = [replace(least, cpu_nbytes=least.cpu_nbytes - PAGE)]
    if least.gpu_nbytes is not None:
        less.append(Budgets(least.gpu_nbytes - PAGE, 100 * PAGE))
    for budgets in less:
        if budgets.cpu_nbytes < 0 or (budgets.gpu_nbytes or 0) < 0:
            continue
        assert optimum(chunks, trace, budgets) is None
        with pytest.raises(BudgetError) as caught:
            make_plan(chunks, trace, budgets, links(gpu=gpu))
        needs = {"gpu": least.gpu_nbytes, "cpu": least.cpu_nbytes}
        assert caught.value.needs_nbytes == needs[caught.value.tier]


def test_the_error_says_which_tier_needs_how_much() -> None:
    with pytest.raises(BudgetError, match=r"decode: 4096 bytes of cpu memory are left.*12288; raise cpu_memory by"):
        make_plan([chunk(0, 3)], one_each(1), Budgets(None, PAGE), links(gpu=False))


def test_a_larger_gpu_needs_a_smaller_cpu_tier() -> None:
    chunks = [chunk(0, 4), chunk(1, 2)]
    assert smallest_budgets(chunks, one_each(2), gpu=True) == Budgets(4 * PAGE, 4 * PAGE)
    with pytest.raises(BudgetError) as caught:  # 4 pages kept, a ring of 2: only the chunk of 2 pages is staged
        make_plan(chunks, one_each(2), Budgets(6 * PAGE - PAGE, PAGE), links(gpu=True))
    assert (caught.value.tier, caught.value.needs_nbytes) == ("cpu", 4 * PAGE)
    assert make_plan(chunks, one_each(2), Budgets(6 * PAGE, 0), links(gpu=True)).schedule == ()


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: ChunkSpec(chunk_id=0, nbytes=5000, read_nbytes=1), id="odd slot size"),
        pytest.param(lambda: Links(0.0), id="dead link"),
        pytest.param(lambda: Workload([chunk(0), chunk(0)], one_each(1)), id="same id twice"),
        pytest.param(lambda: Workload([chunk(0)], one_each(2)), id="unknown chunk"),
    ],
)
def test_what_makes_no_sense_is_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(ConfigError):
        make()


# -- spreading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_resident", [1, 7, 20, 25, 38])
def test_streamed_layers_are_spread_evenly_over_the_compute_time(num_resident: int) -> None:
    chunks = [chunk(i, 2) for i in range(40)]
    seconds = [1.0 if i < 20 else 3.0 for i in range(40)]
    trace = Trace("decode", tuple(Moment(f"m{i}", (i,), s) for i, s in enumerate(seconds)))
    residents = make_residents(chunks, trace, Budgets(None, (num_resident + 1) * 2 * PAGE))
    streamed = [i for i in range(40) if i not in residents.cpu_resident]
    assert len(streamed) == 40 - num_resident
    if num_resident < 20:  # else the first half streams all it has and the second cannot be as dense
        return
    for i in range(40):
        so_far = sum(1 for j in streamed if j < i)
        due = len(streamed) * sum(seconds[:i]) / sum(seconds)
        assert abs(so_far - due) <= 1


def test_a_huge_chunk_at_the_end_is_part_of_the_spread() -> None:
    # It streams in any case: the layers before it have to leave the link free in time.
    places = [Place(i, PAGE, i / 21, "layer") for i in range(20)] + [Place(20, 10 * PAGE, 20 / 21, "head")]
    assert sorted(spread_evenly(places, {"layer": 10, "head": 1})) == [*range(1, 11), 20]
    assert sorted(spread_evenly(places[:20], {"layer": 10})) == [*range(2, 20, 2), 19]


def test_chunks_from_disk_are_spread_among_those_that_cross_the_gpu_link() -> None:
    chunks = [chunk(i) for i in range(24)]
    residents = make_residents(chunks, one_each(24), Budgets(13 * PAGE, 9 * PAGE))
    crossing = [i for i in range(24) if i not in residents.gpu_resident]
    on_disk = [i for i in crossing if i not in residents.cpu_resident]
    assert (len(crossing), len(on_disk)) == (12, 4)
    assert {b - a for a, b in pairwise(crossing)} == {2}
    assert {b - a for a, b in pairwise(on_disk)} == {6}


def test_spreading_keeps_what_makes_a_large_moment_fit_the_ring() -> None:
    # One of chunks 2 and 3 has to stay: a ring of two pages is all there is.
    chunks = [chunk(i, 2) for i in range(4)]
    uses = [(0,), (1,), (2, 3)]
    trace = Trace("decode", tuple(Moment(f"m{n}", ids, 1.0) for n, ids in enumerate(uses)))
    residents = make_residents(chunks, trace, Budgets(None, 4 * PAGE))
    assert len(residents.cpu_resident & {2, 3}) == 1
    assert residents.cpu_ring_nbytes == 2 * PAGE


def test_spreading_does_not_break_a_stay_in_two() -> None:
    # While chunk 2 is resident, chunk 1 stays over its moment; chunk 0 is no such bridge. Chunk 3 needs the large ring.
    chunks = [chunk(0), chunk(1, 3), chunk(2), chunk(3, 3)]
    trace = Trace("decode", tuple(Moment(f"m{n}", (i,), 1.0) for n, i in enumerate([0, 1, 2, 1, 3])))
    assert make_residents(chunks, trace, Budgets(None, 4 * PAGE)).cpu_resident == {2}


# -- plans ------------------------------------------------------------------------------------------------------------


@both_tiers
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_plans_keep_budgets_and_predict_no_less_than_the_bound(gpu: bool, data: st.DataObject) -> None:
    chunks, trace = data.draw(workloads())
    budgets = data.draw(budgets_for(chunks, gpu=gpu))
    try:
        plan = make_plan(chunks, trace, budgets, links(gpu=gpu, disk_latency_s=0.25, gpu_latency_s=0.125))
    except BudgetError:
        return
    check_within_budgets(chunks, trace, budgets, plan)
    assert plan.prediction.time_s >= plan.prediction.bound_s >= trace.compute_s


def test_a_ring_of_two_is_worth_a_resident_when_it_hides_the_disk() -> None:
    chunks = [chunk(i) for i in range(8)]
    budgets = Budgets(None, 2 * PAGE)
    least = make_residents(chunks, one_each(8), budgets)
    assert (len(least.cpu_resident), least.cpu_ring_nbytes) == (1, PAGE)
    plan = make_plan(chunks, one_each(8), budgets, links(gpu=False))
    assert (len(plan.cpu_resident), plan.cpu_ring_nbytes) == (0, 2 * PAGE)
    assert plan.prediction.time_s == pytest.approx(8.0)  # with a ring of one: 7 reads and 7 moments in turn


def test_a_ring_of_one_is_kept_when_residents_hide_the_disk() -> None:
    chunks = [chunk(i) for i in range(8)]
    plan = make_plan(chunks, one_each(8), Budgets(None, 5 * PAGE), links(gpu=False))
    assert (len(plan.cpu_resident), plan.cpu_ring_nbytes) == (4, PAGE)
    assert plan.prediction.time_s == pytest.approx(8.0)


def test_the_bottleneck_is_named() -> None:
    chunks = [chunk(i) for i in range(8)]
    names = {
        make_plan(chunks, one_each(8, seconds), Budgets(2 * PAGE, 4 * PAGE), links(gpu=True, link=link)).prediction
        for seconds, link in [(0.01, 100.0 * PAGE), (0.01, PAGE / 8), (9.0, PAGE)]
    }
    assert {prediction.bottleneck for prediction in names} == {"disk", "gpu link", "compute"}


@both_tiers
def test_a_large_workload_leaves_no_room_for_another_resident(gpu: bool) -> None:
    chunks = [chunk(i, 6000 + i % 3) for i in range(300)]
    chunks.append(chunk(300, 40000))
    trace = one_each(301)
    budgets = Budgets(500_000 * PAGE if gpu else None, 600_000 * PAGE)
    residents = make_residents(chunks, trace, budgets)
    assert residents == make_residents(chunks, trace, budgets)
    nbytes = {c.chunk_id: c.nbytes for c in chunks}
    smallest = min(nbytes[i] for i in nbytes if i not in residents.gpu_resident | residents.cpu_resident)
    cpu_room = budgets.cpu_nbytes - sum(nbytes[i] for i in residents.cpu_resident) - residents.cpu_ring_nbytes
    assert 0 <= cpu_room < smallest
    if budgets.gpu_nbytes is not None:
        gpu_room = budgets.gpu_nbytes - sum(nbytes[i] for i in residents.gpu_resident) - residents.gpu_ring_nbytes
        assert 0 <= gpu_room < smallest


def test_planning_needs_no_torch() -> None:
    program = (
        "import sys, hetero.memory.plan, hetero.memory.simulate; sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_what_is_needed_first_after_a_start_stays() -> None:
    """A forward and its backward: the chunk of the turn is needed last in the one and first in the other."""
    order = [*range(8), *reversed(range(8))]
    trace = Trace("iteration", tuple(Moment(f"m{n}", (i,), 1.0) for n, i in enumerate(order)), frozenset({0, 8}))
    for num_pages in range(3, 8):
        plan = make_plan([chunk(i) for i in range(8)], trace, Budgets(None, num_pages * PAGE), links(gpu=False))
        if num_pages < 4:  # one page less than two that stay and a ring of two, which hide everything
            assert 16.0 < plan.prediction.time_s <= 18.0
        else:
            assert plan.prediction.time_s == pytest.approx(16.0) and {0, 7} <= plan.cpu_resident


def test_plans_that_know_of_starts_are_faster_than_those_that_do_not() -> None:
    rng, knowing_s, ignorant_s = random.Random(0), 0.0, 0.0
    for _ in range(40):
        num = rng.randrange(3, 12)
        chunks = [chunk(i, rng.choice([1, 2, 6])) for i in range(num)]
        order = [*range(num), *reversed(range(num))]
        plain = Trace("iteration", tuple(Moment(f"m{n}", (i,), rng.random()) for n, i in enumerate(order)))
        trace = replace(plain, starts=frozenset({0, num}))
        budgets = Budgets(None, 6 * PAGE + rng.randrange(3 * num) * PAGE)
        knowing = make_plan(chunks, trace, budgets, links(gpu=False))
        ignorant = make_plan(chunks, plain, budgets, links(gpu=False))
        first = ignorant.cpu_resident
        stays = uses_of((m.chunk_ids for m in trace.moments), streamed_chunks(chunks, trace, first), trace.starts)
        same = replace(ignorant, schedule=tuple(use.chunk_id for use in stays))
        same_s = simulate(same, chunks, trace, links(gpu=False), num_passes=2).pass_s
        knowing_s, ignorant_s = knowing_s + knowing.prediction.time_s, ignorant_s + same_s
        assert knowing.prediction.time_s <= same_s * 1.1  # the candidates of either are not all plans
    assert knowing_s < 0.99 * ignorant_s
