"""The dictionaries that plans and statistics turn into: what `--json` prints and what the command line renders.

Sizes are bytes, times seconds, rates bytes per second. None means "does not apply" or "not measured".
"""

from __future__ import annotations

from typing import Literal, TypedDict

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
    """One pass of a phase. `bound_s` is the time below which no schedule can go."""

    phase: str
    disk_nbytes: int
    gpu_link_nbytes: int
    time_s: float
    bound_s: float
    tokens_per_s: float | None
    bottleneck: str


class PlanDict(TypedDict):
    """A plan. `notes` are sentences for a person: the cheapest improvement, a measured rate that was assumed."""

    model: str
    dtype: str
    device: str
    total_nbytes: int
    tiers: list[TierPlan]
    phases: list[PhasePlan]
    notes: list[str]


class LinkStats(TypedDict):
    """What crossed one link. `bytes_per_s` is over the time the link was busy, `decode_nbytes_per_token` an average."""

    moved_nbytes: int
    decode_nbytes_per_token: float | None
    bytes_per_s: float | None
    limit_bytes_per_s: float | None


class TierStats(TypedDict):
    peak_nbytes: int
    limit_nbytes: int


class StatsDict(TypedDict):
    """What a run did. `baseline_nbytes` is the RAM of the interpreter and its libraries, measured before any weight."""

    prompt_tokens: int
    prompt_tokens_per_s: float
    generation_tokens: int
    generation_tokens_per_s: float
    links: dict[str, LinkStats]
    tiers: dict[str, TierStats]
    baseline_nbytes: int
