"""The dictionaries that plans and statistics turn into: what `--json` prints and what the command line renders.

Sizes are bytes, times seconds, rates bytes per second. None means "does not apply" or "not measured".
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

TierName = Literal["gpu", "cpu", "disk"]


class TierPlan(TypedDict):
    """What a plan puts into one tier. `streamed_nbytes` leave it once per decode pass, over the link beside it."""

    tier: TierName
    limit_nbytes: int | None
    resident_nbytes: int | None
    ring_nbytes: int | None
    other_nbytes: int | None
    streamed_nbytes: int | None
    link_bytes_per_s: float | None


class PhasePlan(TypedDict):
    """One pass of a phase, for `num_tokens` tokens. `bound_s` is the time below which no schedule can go."""

    phase: str
    num_tokens: int
    disk_nbytes: int
    gpu_link_nbytes: int
    time_s: float
    bound_s: float
    tokens_per_s: float | None
    bottleneck: str


class PlanDict(TypedDict):
    """A plan. `notes` are sentences for a person."""

    model: str
    total_nbytes: int
    dtype: str
    device: str
    context: int
    num_chunks: int
    chunk_nbytes: int
    tiers: list[TierPlan]
    phases: list[PhasePlan]
    notes: list[str]


class LinkStats(TypedDict):
    """What crossed one link, its rate over the time of the passes, and what the link can do."""

    nbytes: int
    bytes_per_s: float | None
    limit_bytes_per_s: float | None


class TierStats(TypedDict):
    used_nbytes: int
    peak_nbytes: int
    limit_nbytes: int
    holders: dict[str, int]


class StatsDict(TypedDict):
    """What a run did. `baseline_nbytes` is the RAM of the interpreter and its libraries, measured before any weight;
    `huge_page_nbytes` of the `arena_nbytes` sit on huge pages, which a disk fills faster."""

    prompt_tokens: int
    prompt_tokens_per_s: float
    generation_tokens: int
    generation_tokens_per_s: float
    num_passes: int
    disk_nbytes_per_token: float | None
    pass_s: float | None
    bound_s: float
    bottleneck: str
    links: dict[str, LinkStats]
    tiers: dict[str, TierStats]
    baseline_nbytes: int
    arena_nbytes: int
    huge_page_nbytes: int
    executor: dict[str, Any]
    io: dict[str, Any]
