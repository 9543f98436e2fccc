"""Plan a phase: trace + budgets + measured links -> residents, rings, schedule and what to expect. No torch.

Note [ring sizes]
    Residents are chosen for the least traffic (`placement`). A ring that holds one moment only cannot overlap the next
    transfer with compute; a larger one can, and costs residents. So the traffic-optimal choice and some with larger
    rings are simulated, and the fastest is taken; among those within TOLERANCE of it the one with the least traffic,
    then with the smallest rings. The search ends early when a candidate reaches the bound of the least traffic, which
    no other can beat.

Note [starts]
    What the first moment after a start needs cannot be fetched while something else computes. Traffic does not tell
    such chunks from others, so placements that keep them are simulated as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from statistics import median_low

from hetero.memory.placement import Choice, Placement, make_residents
from hetero.memory.plan_types import (
    BudgetError,
    Budgets,
    ChunkSpec,
    Links,
    Moment,
    Plan,
    Prediction,
    Residents,
    Trace,
    streamed_chunks,
    uses_of,
)
from hetero.memory.simulate import Simulation, simulate
from hetero.memory.workload import Traffic, Workload

__all__ = [
    "BudgetError",
    "Budgets",
    "ChunkSpec",
    "Links",
    "Moment",
    "Plan",
    "Prediction",
    "Residents",
    "Trace",
    "make_plan",
    "make_residents",
    "smallest_budgets",
]

TOLERANCE = 0.005  # of the pass time: less than a measurement can tell apart
MORE_MOMENTS = (0, 1, 2, 3, 5, 8)  # ring sizes tried: what is needed and so many typical moments more
MORE_MOMENTS_WITH_GPU = (0, 1, 3)  # for each of the two rings
NUM_PASSES_OF_SEARCH = 2


def make_plan(chunks: Sequence[ChunkSpec], trace: Trace, budgets: Budgets, links: Links) -> Plan:
    """Make the plan of a phase, Note [ring sizes].

    Whether there is a gpu tier must be said alike by `budgets.gpu_nbytes` and `links.gpu_bytes_per_s`. Raises
    BudgetError, with the smallest budget that works, when a tier cannot hold what must pass through it.
    """
    assert (budgets.gpu_nbytes is None) == (links.gpu_bytes_per_s is None), "a gpu tier has a budget and a link"
    candidates = _candidates(chunks, trace, budgets, links)
    if trace.starts:
        first = _needed_first(trace)
        with suppress(BudgetError):
            kept = [replace(chunk, pinned=chunk.pinned or chunk.chunk_id in first) for chunk in chunks]
            candidates += _candidates(kept, trace, budgets, links)
    fastest_s = min(plan.prediction.time_s for plan in candidates)
    fast = [plan for plan in candidates if plan.prediction.time_s <= fastest_s * (1 + TOLERANCE)]
    chosen = min(fast, key=_traffic_of)
    return replace(chosen, prediction=predict(simulate(chosen, chunks, trace, links, with_spans=False), trace, links))


def _needed_first(trace: Trace) -> set[int]:
    """What the first moment after each start that needs anything needs."""
    found: set[int] = set()
    for start in trace.starts:
        found.update(next((m.chunk_ids for m in trace.moments[start:] if m.chunk_ids), ()))
    return found


def _candidates(chunks: Sequence[ChunkSpec], trace: Trace, budgets: Budgets, links: Links) -> list[Plan]:
    """Plans of the least traffic and with larger rings, the fastest of which is worth taking. Raises BudgetError."""
    workload = Workload(chunks, trace)
    workload.check(budgets)
    placement = Placement(workload, budgets)
    base = placement.best()
    candidates = [_predicted(placement.residents(base), chunks, trace, links, NUM_PASSES_OF_SEARCH)]
    fastest_s, floor_s = candidates[0].prediction.time_s, candidates[0].prediction.bound_s
    for ring_nbytes, staging_nbytes in _larger_rings(workload, placement.has_gpu, base):
        if fastest_s <= floor_s * (1 + TOLERANCE):
            break
        least = placement.least_traffic(ring_nbytes, staging_nbytes)
        if max(_link_times_s(least, links).values()) >= fastest_s:
            continue
        choice = placement.at(ring_nbytes, staging_nbytes)
        if choice is not None:
            residents = placement.residents(choice, ring_nbytes, staging_nbytes)
            candidates.append(_predicted(residents, chunks, trace, links, NUM_PASSES_OF_SEARCH))
            fastest_s = min(fastest_s, candidates[-1].prediction.time_s)
    return candidates


def smallest_budgets(chunks: Sequence[ChunkSpec], trace: Trace, *, gpu: bool) -> Budgets:
    """The smallest budgets that `make_plan` accepts, exactly: with a gpu tier the smallest gpu budget, and the smallest
    cpu budget beside it.
    """
    workload = Workload(chunks, trace)
    first_nbytes = workload.smallest_first_nbytes()
    if not gpu:
        return Budgets(None, first_nbytes)
    return Budgets(first_nbytes, workload.smallest_staging(first_nbytes)[0])


def _larger_rings(workload: Workload, has_gpu: bool, base: Choice) -> Iterator[tuple[int, int]]:
    streamed = frozenset(workload.free) - base.first
    if not streamed:
        return
    moments = [workload.size_of(need & streamed) for need in workload.needs]
    rings = _sizes(base.ring_nbytes, median_low([nbytes for nbytes in moments if nbytes]), has_gpu)
    on_disk = [workload.nbytes[i] for i in streamed - base.second]
    stagings = [0]
    if has_gpu and on_disk:
        stagings = _sizes(base.staging_nbytes, median_low(on_disk), has_gpu)
    pairs = set(product(rings, stagings)) - {(base.ring_nbytes, base.staging_nbytes)}
    yield from sorted(pairs, key=lambda pair: (sum(pair), pair))


def _sizes(needed_nbytes: int, typical_nbytes: int, has_gpu: bool) -> list[int]:
    more = MORE_MOMENTS_WITH_GPU if has_gpu else MORE_MOMENTS
    sizes = {needed_nbytes + num * typical_nbytes for num in more}
    # One huge moment sets `needed_nbytes`: its chunks could be resident instead, and the ring fit the others.
    sizes |= {num * typical_nbytes for num in (2, 3) if num * typical_nbytes < needed_nbytes}
    return sorted(sizes)


def _predicted(residents: Residents, chunks: Sequence[ChunkSpec], trace: Trace, links: Links, num_passes: int) -> Plan:
    first = residents.cpu_resident if links.gpu_bytes_per_s is None else residents.gpu_resident
    streamed = streamed_chunks(chunks, trace, first)
    uses = uses_of((moment.chunk_ids for moment in trace.moments), streamed, trace.starts)
    plan = Plan(
        phase=trace.phase,
        gpu_resident=residents.gpu_resident,
        cpu_resident=residents.cpu_resident,
        schedule=tuple(use.chunk_id for use in uses),
        gpu_ring_nbytes=residents.gpu_ring_nbytes,
        cpu_ring_nbytes=residents.cpu_ring_nbytes,
        prediction=Prediction(0.0, 0.0, "compute", 0, 0),
    )
    simulation = simulate(plan, chunks, trace, links, num_passes=num_passes, with_spans=False)
    return replace(plan, prediction=predict(simulation, trace, links))


def predict(simulation: Simulation, trace: Trace, links: Links) -> Prediction:
    """Sum a simulation up beside the bound: the busiest of the links, at their full rates, and compute."""
    traffic = Traffic(simulation.disk_nbytes, simulation.gpu_link_nbytes)
    least_s = {"compute": trace.compute_s, **_link_times_s(traffic, links)}
    bottleneck = max(least_s, key=lambda name: least_s[name])
    return Prediction(
        time_s=max(simulation.pass_s, least_s[bottleneck]),
        bound_s=least_s[bottleneck],
        bottleneck=bottleneck,
        disk_nbytes=simulation.disk_nbytes,
        gpu_link_nbytes=simulation.gpu_link_nbytes,
    )


def _link_times_s(traffic: Traffic, links: Links) -> dict[str, float]:
    times_s = {"disk": traffic.disk_nbytes / links.disk_bytes_per_s}
    if links.gpu_bytes_per_s is not None:
        times_s["gpu link"] = traffic.gpu_link_nbytes / links.gpu_bytes_per_s
    return times_s


def _traffic_of(plan: Plan) -> tuple[int, int, int]:
    prediction = plan.prediction
    return prediction.disk_nbytes, prediction.gpu_link_nbytes, plan.gpu_ring_nbytes + plan.cpu_ring_nbytes
