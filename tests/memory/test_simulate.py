"""The simulation: cases computed by hand, the executor's own rules, and what must hold for every plan."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.memory.plan import BudgetError, Budgets, ChunkSpec, Links, Moment, Plan, Prediction, Trace, make_plan
from hetero.memory.plan_types import Use, uses_of
from hetero.memory.ring import Ring, Space
from hetero.memory.schedule import stays_of
from hetero.memory.simulate import RingModel, Simulation, simulate
from tests.memory.executor_rig import rig, write_chunks
from tests.memory.planning import PAGE, budgets_for, chunk, links, one_each, workloads

NOTHING = Prediction(0.0, 0.0, "compute", 0, 0)


def plan_of(
    schedule: tuple[int, ...],
    *,
    cpu: set[int] = frozenset(),  # type: ignore[assignment]
    gpu: set[int] = frozenset(),  # type: ignore[assignment]
    cpu_ring: int = 0,
    gpu_ring: int = 0,
) -> Plan:
    return Plan("decode", frozenset(gpu), frozenset(cpu), schedule, gpu_ring * PAGE, cpu_ring * PAGE, NOTHING)


def bars(simulation: Simulation, lane: str) -> list[tuple[str, float, float]]:
    return [(span.name, span.start_s, span.end_s) for span in simulation.spans if span.lane == lane]


# -- from disk into the first tier: a page takes one second ------------------------------------------------------------


@pytest.mark.parametrize(
    ("ring", "compute_s", "expected_s"),
    [
        pytest.param(1, 0.5, 4 * 1.5, id="a ring of one: read and compute in turn"),
        pytest.param(1, 3.0, 4 * 4.0, id="a ring of one: also when compute is long"),
        pytest.param(2, 0.5, 4 * 1.0, id="a ring of two: the disk never waits"),
        pytest.param(2, 3.0, 4 * 3.0, id="a ring of two: compute never waits"),
        pytest.param(3, 0.5, 4 * 1.0, id="more changes nothing"),
    ],
)
def test_everything_streams(ring: int, compute_s: float, expected_s: float) -> None:
    chunks = [chunk(i) for i in range(4)]
    plan = plan_of((0, 1, 2, 3), cpu_ring=ring)
    simulation = simulate(plan, chunks, one_each(4, compute_s), links(gpu=False))
    assert simulation.pass_s == pytest.approx(expected_s)
    assert simulation.stall_s["disk"] == pytest.approx(expected_s - 4.0)
    assert simulation.stall_s["compute"] == pytest.approx(expected_s - 4 * compute_s)
    assert (simulation.disk_nbytes, simulation.gpu_link_nbytes) == (4 * PAGE, 0)


def test_the_next_pass_is_prefetched_during_this_one() -> None:
    # The only streamed chunk is used first: its read starts when its moment ends and hides behind the other three.
    chunks = [chunk(i) for i in range(4)]
    simulation = simulate(plan_of((0,), cpu={1, 2, 3}, cpu_ring=1), chunks, one_each(4, 0.5), links(gpu=False))
    assert simulation.first_pass_s == pytest.approx(1.0 + 4 * 0.5)
    assert simulation.pass_s == pytest.approx(4 * 0.5)
    assert bars(simulation, "disk")[:2] == [("chunk 0", 0.0, 1.0), ("chunk 0", 1.5, 2.5)]


def test_residents_between_hide_the_reads_only_when_they_lie_evenly() -> None:
    chunks = [chunk(i) for i in range(4)]
    trace = one_each(4, 1.0)
    even = simulate(plan_of((1, 3), cpu={0, 2}, cpu_ring=1), chunks, trace, links(gpu=False))
    tail = simulate(plan_of((2, 3), cpu={0, 1}, cpu_ring=1), chunks, trace, links(gpu=False))
    assert even.pass_s == pytest.approx(4.0)
    assert tail.pass_s == pytest.approx(5.0)


def test_disk_latency_counts_when_the_disk_was_idle() -> None:
    chunks = [chunk(i) for i in range(4)]
    slow = links(gpu=False, disk_latency_s=0.25)
    in_turn = simulate(plan_of((0, 1, 2, 3), cpu_ring=1), chunks, one_each(4, 0.5), slow)
    assert in_turn.pass_s == pytest.approx(4 * (1.0 + 0.25 + 0.5))
    queued = simulate(plan_of((0, 1, 2, 3), cpu_ring=2), chunks, one_each(4, 0.5), slow)
    assert queued.pass_s == pytest.approx(4 * 1.0)
    assert bars(queued, "disk")[0] == ("chunk 0", 0.0, 1.25)


def test_rows_of_a_table_are_waited_for_and_delay_the_next_read() -> None:
    table = ChunkSpec(chunk_id=0, nbytes=8 * PAGE, read_nbytes=8 * PAGE, by_rows=True, row_read_nbytes=PAGE // 2)
    slow = links(gpu=False, disk_latency_s=0.25)
    alone = simulate(plan_of((), cpu={1}), [table, chunk(1)], one_each(2), slow)
    assert alone.pass_s == pytest.approx(0.5 + 0.25 + 2 * 1.0)
    assert alone.disk_nbytes == PAGE // 2
    streaming = simulate(plan_of((1,), cpu_ring=2), [table, chunk(1)], one_each(2, 0.01), links(gpu=False))
    assert streaming.disk_nbytes == PAGE // 2 + PAGE
    assert streaming.pass_s == pytest.approx(0.5 + 1.0 + 0.01)  # one chunk: it is not fetched again while it is used


def test_a_moment_of_two_chunks_waits_for_both_and_frees_both() -> None:
    chunks = [chunk(i) for i in range(4)]
    trace = Trace("decode", (Moment("a", (0, 1), 0.5), Moment("b", (2, 3), 0.5)))
    assert simulate(plan_of((0, 1, 2, 3), cpu_ring=2), chunks, trace, links(gpu=False)).pass_s == pytest.approx(5.0)
    assert simulate(plan_of((0, 1, 2, 3), cpu_ring=3), chunks, trace, links(gpu=False)).pass_s == pytest.approx(4.0)


def test_a_chunk_stays_for_successive_moments_and_returns_for_later_ones() -> None:
    chunks = [chunk(i) for i in range(3)]
    trace = Trace("decode", tuple(Moment(f"m{n}", (i,), 1.0) for n, i in enumerate([0, 0, 2, 0, 1, 0])))
    simulation = simulate(plan_of((0, 1, 0), cpu={2}, cpu_ring=1), chunks, trace, links(gpu=False))
    assert simulation.disk_nbytes == 3 * PAGE
    # Chunk 0 stays over the resident's moment; after the last moment it is fetched anew for the first one.
    assert simulation.pass_s == pytest.approx(6 * 1.0 + 3 * 1.0)


@pytest.mark.parametrize(
    ("starts", "expected_s"),
    [((), 4 * 1.0), ((0,), 4 * 1.0 + 1.0), ((0, 2), 4 * 1.0 + 2.0), ((0, 1, 2, 3), 4 * 1.0 + 4.0)],
    ids=str,
)
def test_what_is_needed_first_after_a_start_is_waited_for(starts: tuple[int, ...], expected_s: float) -> None:
    chunks = [chunk(i) for i in range(4)]
    trace = replace(one_each(4, 1.0), starts=frozenset(starts))
    simulation = simulate(plan_of((0, 1, 2, 3), cpu_ring=3), chunks, trace, links(gpu=False))
    assert simulation.pass_s == pytest.approx(expected_s)
    assert simulation.disk_nbytes == 4 * PAGE


def test_a_start_ends_every_stay() -> None:
    chunks = [chunk(0), chunk(1)]
    trace = Trace("iteration", (Moment("a", (0,), 1.0), Moment("b", (0,), 1.0)), frozenset({0, 1}))
    simulation = simulate(plan_of((0, 0), cpu={1}, cpu_ring=2), chunks, trace, links(gpu=False))
    assert simulation.disk_nbytes == 2 * PAGE
    assert simulation.pass_s == pytest.approx(2 * 1.0 + 2 * 1.0)


def test_a_start_waits_for_staging_as_well() -> None:
    chunks = [chunk(i) for i in range(2)]
    trace = replace(one_each(2, 10.0), starts=frozenset({0, 1}))
    simulation = simulate(plan_of((0, 1), cpu_ring=2, gpu_ring=2), chunks, trace, links(gpu=True))
    assert bars(simulation, "disk")[:2] == [("chunk 0", 0.0, 1.0), ("chunk 1", 11.5, 12.5)]
    assert simulation.pass_s == pytest.approx(2 * (1.5 + 10.0))


def test_gaps_too_small_for_a_moment_cost_a_second_fetch() -> None:
    # A ring of 5: after 0 (2 pages) chunk 1 (2 pages) lies at 2..4, and 2 (3 pages) fits neither before nor after it.
    chunks = [chunk(0, 2), chunk(1, 2), chunk(2, 3)]
    trace = Trace("decode", (Moment("a", (0,), 1.0), Moment("b", (1, 2), 1.0)))
    tight = simulate(plan_of((0, 1, 2), cpu_ring=5), chunks, trace, links(gpu=False))
    assert tight.num_refetches == 2
    assert tight.disk_nbytes == (2 + 2 + 3 + 2) * PAGE
    roomy = simulate(plan_of((0, 1, 2), cpu_ring=7), chunks, trace, links(gpu=False))
    assert roomy.num_refetches == 0
    assert roomy.disk_nbytes == (2 + 2 + 3) * PAGE


# -- with a gpu tier: a page takes one second from disk and half a second over the link --------------------------------


@pytest.mark.parametrize(
    ("staging", "gpu_ring", "compute_s", "expected_s"),
    [
        pytest.param(1, 2, 0.25, 4 * 1.5, id="staging one: read and copy in turn"),
        pytest.param(2, 2, 0.25, 4 * 1.0, id="staging two: disk bound"),
        pytest.param(2, 1, 1.0, 4 * 1.5, id="gpu ring of one: copy and compute in turn"),
        pytest.param(2, 2, 2.0, 4 * 2.0, id="compute bound"),
    ],
)
def test_chunks_on_disk_pass_through_staging(staging: int, gpu_ring: int, compute_s: float, expected_s: float) -> None:
    chunks = [chunk(i) for i in range(4)]
    plan = plan_of((0, 1, 2, 3), cpu_ring=staging, gpu_ring=gpu_ring)
    simulation = simulate(plan, chunks, one_each(4, compute_s), links(gpu=True))
    assert simulation.pass_s == pytest.approx(expected_s)
    assert (simulation.disk_nbytes, simulation.gpu_link_nbytes) == (4 * PAGE, 4 * PAGE)
    assert simulation.stall_s["gpu link"] == pytest.approx(expected_s - 4 * 0.5)


def test_chunks_on_the_cpu_cross_the_link_only() -> None:
    chunks = [chunk(i) for i in range(4)]
    plan = plan_of((0, 1, 2, 3), cpu={0, 1, 2, 3}, gpu_ring=2)
    simulation = simulate(plan, chunks, one_each(4, 0.1), links(gpu=True, gpu_latency_s=0.25))
    assert simulation.pass_s == pytest.approx(4 * 0.75)  # every copy pays the latency
    assert (simulation.disk_nbytes, simulation.gpu_link_nbytes) == (0, 4 * PAGE)


def test_the_disk_reads_ahead_while_chunks_of_the_cpu_are_copied() -> None:
    chunks = [chunk(i) for i in range(4)]
    plan = plan_of((0, 1, 2, 3), cpu={0, 1, 2}, cpu_ring=1, gpu_ring=2)
    simulation = simulate(plan, chunks, one_each(4, 0.1), links(gpu=True))
    assert simulation.pass_s == pytest.approx(4 * 0.5)
    assert bars(simulation, "disk")[0] == ("chunk 3", 0.0, 1.0)


def test_staging_runs_at_most_one_pass_ahead() -> None:
    # The staging ring has room for three copies of the one streamed chunk; the third is read for the third pass, when
    # the second has left for the gpu tier.
    plan = plan_of((0,), cpu_ring=3, gpu_ring=1)
    simulation = simulate(plan, [chunk(0)], one_each(1, 10.0), links(gpu=True))
    assert bars(simulation, "disk") == [("chunk 0", 0.0, 1.0), ("chunk 0", 1.0, 2.0), ("chunk 0", 11.5, 12.5)]


def test_the_timeline_is_that_of_the_rules() -> None:
    chunks = [chunk(0), chunk(1)]
    plan = plan_of((0, 1), cpu={1}, cpu_ring=1, gpu_ring=1)
    simulation = simulate(plan, chunks, one_each(2, 1.0), links(gpu=True), num_passes=2)
    assert bars(simulation, "disk") == [("chunk 0", 0.0, 1.0), ("chunk 0", 1.5, 2.5)]
    assert bars(simulation, "gpu link") == [
        ("chunk 0", 1.0, 1.5),
        ("chunk 1", 2.5, 3.0),
        ("chunk 0", 4.0, 4.5),
        ("chunk 1", 5.5, 6.0),
    ]
    assert bars(simulation, "compute") == [
        ("layer 0", 1.5, 2.5),
        ("layer 1", 3.0, 4.0),
        ("layer 0", 4.5, 5.5),
        ("layer 1", 6.0, 7.0),
    ]
    assert simulate(plan, chunks, one_each(2, 1.0), links(gpu=True), with_spans=False).spans == ()


# -- the executor's rules ---------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    moments=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True), max_size=12),
    streamed=st.frozensets(st.integers(0, 5)),
)
def test_uses_are_the_executors_stays(moments: list[list[int]], streamed: frozenset[int]) -> None:
    uses = uses_of(moments, streamed)
    assert [use.chunk_id for use in uses] == [stay.chunk_id for stay in stays_of(moments, streamed)]
    nums = [sum(use.chunk_id in ids for ids in moments[use.first_moment : use.last_moment + 1]) for use in uses]
    assert nums == [stay.num_uses for stay in stays_of(moments, streamed)]
    assert uses == sorted(uses, key=lambda use: use.first_moment)
    assert all(isinstance(use, Use) for use in uses)


@pytest.mark.parametrize("seed", range(5))
def test_places_are_those_of_the_executors_ring(seed: int) -> None:
    rng = random.Random(seed)
    real, model = Ring(0, 16), RingModel(16)
    taken: list[tuple[Space, tuple[int, int]]] = []
    num_fits = 0
    for now in range(400):
        if taken and rng.random() < 0.45:  # mostly first in, first out, as a pass does
            space, modelled = taken.pop(0 if rng.random() < 0.9 else rng.randrange(len(taken)))
            real.free(space, None)
            model.free_at(float(now), [modelled])
        nbytes = rng.choice([1, 2, 3, 5])
        found, expected = model.take(nbytes, float(now)), real.allocate(nbytes)
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            assert found == ((expected.address, expected.address + nbytes), float(now))
            taken.append((expected, found[0]))
            num_fits += 1
    assert num_fits > 100


@pytest.mark.parametrize("budget", [8, 14, 22], ids=["little", "half", "most"])
@pytest.mark.parametrize("seed", range(3))
def test_the_executor_reads_what_is_simulated(tmp_path: Path, budget: int, seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice([1, 2, 5]) * PAGE - 200 for _ in range(12)]
    order = [*range(12), 3]
    written, _ = write_chunks(tmp_path, sizes)
    chunks = [ChunkSpec(chunk_id=c.chunk_id, nbytes=c.nbytes, read_nbytes=c.read_nbytes) for c in written]
    trace = Trace("decode", tuple(Moment(f"m{n}", (i,), 0.0) for n, i in enumerate(order)))
    plan = make_plan(chunks, trace, Budgets(None, budget * PAGE), links(gpu=False))
    simulation = simulate(plan, chunks, trace, links(gpu=False))
    assert simulation.num_refetches == 0
    stays = stays_of((moment.chunk_ids for moment in trace.moments), set(plan.schedule))
    assert tuple(stay.chunk_id for stay in stays) == plan.schedule
    with rig(
        tmp_path, sizes, ring_nbytes=plan.cpu_ring_nbytes, schedule=stays, resident=sorted(plan.cpu_resident)
    ) as r:
        r.check_all(order)
        before = r.executor.stats.read_nbytes
        for _ in range(4):
            r.check_all(order)
        # What is read ahead at the ends of two passes may differ by what the ring holds.
        assert abs(r.executor.stats.read_nbytes - before - 4 * simulation.disk_nbytes) <= plan.cpu_ring_nbytes
        assert r.executor.stats.num_demands == r.executor.stats.num_abandoned == 0


# -- for every plan ---------------------------------------------------------------------------------------------------


def check_lanes_are_serial(simulation: Simulation) -> None:
    lanes: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for span in simulation.spans:
        if not span.name.endswith(" rows"):
            lanes[span.lane].append((span.start_s, span.end_s))
    for spans in lanes.values():
        assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(spans))


@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_bytes_bounds_and_rings_hold_for_every_plan(gpu: bool, data: st.DataObject) -> None:
    chunks, trace = data.draw(workloads())
    trace = replace(trace, starts=data.draw(st.frozensets(st.integers(0, len(trace.moments)))))
    budgets = data.draw(budgets_for(chunks, gpu=gpu))
    rates: Links = data.draw(
        st.builds(
            Links,
            st.sampled_from([PAGE / 4, PAGE, 8.0 * PAGE]),
            st.sampled_from([PAGE / 4, PAGE, 8.0 * PAGE]) if gpu else st.none(),
            st.sampled_from([0.0, 0.5]),
            st.sampled_from([0.0, 0.5]),
        )
    )
    try:
        plan = make_plan(chunks, trace, budgets, rates)
    except BudgetError:
        return
    simulation = simulate(plan, chunks, trace, rates, num_passes=4)
    specs = {c.chunk_id: c for c in chunks}
    used = {i for moment in trace.moments for i in moment.chunk_ids}
    from_disk = [specs[i] for i in plan.schedule if not gpu or i not in plan.cpu_resident]
    away = [c for c in chunks if c.by_rows and c.chunk_id in used - plan.gpu_resident - plan.cpu_resident]
    least = sum(c.read_nbytes for c in from_disk) + sum(c.row_read_nbytes for c in away if not c.pinned)
    assert simulation.disk_nbytes >= least
    if simulation.num_refetches == 0:
        assert simulation.disk_nbytes == least
        assert simulation.gpu_link_nbytes == (sum(specs[i].nbytes for i in plan.schedule) if gpu else 0)
    assert simulation.pass_s >= trace.compute_s
    assert simulation.pass_s >= simulation.disk_nbytes / rates.disk_bytes_per_s
    if rates.gpu_bytes_per_s is not None:
        assert simulation.pass_s >= simulation.gpu_link_nbytes / rates.gpu_bytes_per_s
    assert simulation.peak_ring_nbytes["gpu"] <= plan.gpu_ring_nbytes
    assert simulation.peak_ring_nbytes["cpu"] <= plan.cpu_ring_nbytes
    check_lanes_are_serial(simulation)
    assert simulation == simulate(plan, chunks, trace, rates, num_passes=4)


@settings(max_examples=100, deadline=None)
@given(
    num_chunks=st.integers(2, 12),
    ring=st.integers(1, 5),
    seconds=st.lists(st.sampled_from([0.0, 0.5, 1.0, 4.0]), min_size=12, max_size=12),
)
def test_a_larger_ring_of_equal_chunks_is_never_slower(num_chunks: int, ring: int, seconds: list[float]) -> None:
    chunks = [chunk(i) for i in range(num_chunks)]
    trace = Trace("decode", tuple(Moment(f"m{i}", (i,), seconds[i]) for i in range(num_chunks)))
    times = [
        simulate(plan_of(tuple(range(num_chunks)), cpu_ring=size), chunks, trace, links(gpu=False), num_passes=4).pass_s
        for size in (ring, ring + 1)
    ]
    assert times[1] <= times[0] + 1e-9
