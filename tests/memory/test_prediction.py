"""Predictions against the executor that carries them out: in virtual time exactly, in real time within ten per cent."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from hetero.memory.plan import Budgets, ChunkSpec, Links, Moment, Trace, make_plan, smallest_budgets
from hetero.memory.simulate import simulate
from tests.memory.planning import PAGE, chunk, one_each
from tests.memory.prediction_rig import NUM_MEASURED, SETTINGS, run_setting
from tests.memory.virtual_time import run_passes

TOLERANCE = 0.10
NUM_WORKLOADS = 80
NUM_PASSES = 4


def random_workload(rng: random.Random, *, shared: bool, gpu: bool) -> tuple[list[ChunkSpec], Trace, Budgets, Links]:
    """Times and rates are irregular, so that two things hardly ever happen at once."""
    chunks = [chunk(i, rng.randint(1, 4)) for i in range(rng.randint(1, 9))]
    ids = range(len(chunks))
    uses: list[tuple[int, ...]] = [(i,) for i in ids]
    if shared:
        uses = [tuple(rng.sample(ids, min(len(ids), rng.randint(1, 3)))) for _ in range(rng.randint(1, 8))]
    moments = [Moment(f"m{n}", use, rng.choice([0.2, 1, 3]) * rng.uniform(0.5, 1.5)) for n, use in enumerate(uses)]
    trace = Trace("decode", tuple(moments))
    least = smallest_budgets(chunks, trace, gpu=gpu)
    num_pages = sum(c.nbytes for c in chunks) // PAGE
    budgets = Budgets(
        None if least.gpu_nbytes is None else least.gpu_nbytes + rng.randint(0, num_pages) * PAGE,
        least.cpu_nbytes + rng.randint(0, num_pages) * PAGE,
    )
    latency_s = rng.choice([0.0, 0.25])
    gpu_rate = PAGE * rng.uniform(0.5, 3) if gpu else None
    return chunks, trace, budgets, Links(PAGE * rng.uniform(0.8, 1.2), gpu_rate, latency_s, 0.7 * latency_s)


@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("shared", [False, True], ids=["one-chunk-moments", "shared-chunks"])
def test_the_executor_keeps_the_simulated_times_exactly(gpu: bool, shared: bool) -> None:
    num_compared = 0
    for seed in range(NUM_WORKLOADS):
        chunks, trace, budgets, links = random_workload(random.Random(seed), shared=shared, gpu=gpu)
        plan = make_plan(chunks, trace, budgets, links)
        simulation = simulate(plan, chunks, trace, links, num_passes=NUM_PASSES)
        if simulation.num_refetches:
            continue  # a ring without a gap for a moment: both start over, but not with the same chunk
        passes = run_passes(plan, chunks, trace, links, NUM_PASSES)
        simulated = [(span.start_s, span.end_s) for span in simulation.spans if span.lane == "compute"]
        for times, expected in zip(passes.computed, simulated, strict=True):
            assert times == pytest.approx(expected), f"{seed=}"
        assert passes.stats.num_demands == passes.stats.num_abandoned == 0, f"{seed=}"
        num_compared += 1
    assert num_compared > 0.9 * NUM_WORKLOADS


def test_taking_one_chunk_of_a_moment_does_not_pass_over_another() -> None:
    # Chunk 1 comes after 0 in the ring, and the second moment names it first: taking it must not end the stay of 0.
    chunks = [chunk(0), chunk(1), chunk(2)]
    trace = Trace("decode", (Moment("a", (0,), 1.0), Moment("b", (1, 0), 1.0), Moment("c", (2,), 1.0)))
    links = Links(float(PAGE))
    plan = make_plan(chunks, trace, smallest_budgets(chunks, trace, gpu=False), links)
    passes = run_passes(plan, chunks, trace, links, 3)
    assert passes.stats.num_demands == passes.stats.num_abandoned == 0


def test_a_virtual_pass_takes_what_was_computed_by_hand() -> None:
    chunks, trace, links = [chunk(i) for i in range(4)], one_each(4, 0.5), Links(float(PAGE))
    plan = make_plan(chunks, trace, Budgets(None, PAGE), links)
    assert run_passes(plan, chunks, trace, links, 2).computed[-1][1] == pytest.approx(2 * 4 * 1.5)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_steady_pass_takes_what_was_predicted(name: str, tmp_path: Path, no_leaks: None) -> None:
    setting = SETTINGS[name]
    outcome = run_setting(setting, tmp_path)
    prediction = outcome.plan.prediction
    assert abs(outcome.disk_nbytes - NUM_MEASURED * prediction.disk_nbytes) <= outcome.slack_nbytes
    assert abs(outcome.gpu_link_nbytes - NUM_MEASURED * prediction.gpu_link_nbytes) <= outcome.slack_nbytes
    assert setting.expected in ("", prediction.bottleneck)
    assert outcome.measured_s == pytest.approx(outcome.predicted_s, rel=TOLERANCE)
    # The plan knew nothing of late threads, which only ever add to a pass.
    assert outcome.planned_s < outcome.measured_s * 1.03


def test_the_settings_span_every_bottleneck() -> None:
    made_for = Counter(setting.expected for setting in SETTINGS.values())
    assert len(SETTINGS) >= 12 and all(made_for[name] for name in ("disk", "gpu link", "compute", ""))
