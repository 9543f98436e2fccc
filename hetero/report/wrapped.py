"""What a wrapped run says of itself: its plan before, its figures after."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from hetero.memory.sizes import format_size


@dataclass(frozen=True, slots=True)
class TierShare:
    """Bytes of one tier: its limit, the weights whose home it is, the ring, and the peak of everything else."""

    limit_nbytes: int
    weights_nbytes: int
    ring_nbytes: int
    other_nbytes: int

    @property
    def peak_nbytes(self) -> int:
        """What the tier should hold at most."""
        return self.weights_nbytes + self.ring_nbytes + self.other_nbytes


@dataclass(frozen=True, slots=True)
class WrapPlan:
    """Where the weights are and what one iteration should cost.

    `state` is "warm-up" until the first iteration has been recorded, then "planned". Traffic is per iteration (a
    forward, and its backward when gradients are on), in bytes of slots; times are None during the warm-up.
    """

    state: str
    num_chunks: int
    num_streamed: int
    tiers: dict[str, TierShare]
    activations_nbytes: int
    disk_nbytes: int
    gpu_link_nbytes: int
    time_s: float | None = None
    bound_s: float | None = None
    bottleneck: str | None = None
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.state}: {self.num_streamed} of {self.num_chunks} chunks stream"]
        for tier, share in self.tiers.items():
            lines.append(
                f"  {tier:<5} weights {format_size(share.weights_nbytes):>10}, "
                f"ring {format_size(share.ring_nbytes):>10}, other {format_size(share.other_nbytes):>10} "
                f"of {format_size(share.limit_nbytes)}"
            )
        if self.state == "warm-up":
            lines.append("  per iteration: known after the first")
        else:
            lines.append(
                f"  per iteration: {format_size(self.disk_nbytes)} from disk"
                + (f", {format_size(self.gpu_link_nbytes)} over the gpu link" if "gpu" in self.tiers else "")
                + f"; {format_size(self.activations_nbytes)} of saved activations at their peak"
            )
        if self.time_s is not None and self.bound_s is not None:
            lines.append(f"  expected {self.time_s:.3f} s, bound {self.bound_s:.3f} s by {self.bottleneck}")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


@dataclass(frozen=True, slots=True)
class TierUse:
    used_nbytes: int
    peak_nbytes: int
    limit_nbytes: int
    holders: dict[str, int]


@dataclass(frozen=True, slots=True)
class WrapStats:
    """What happened so far. `num_unleased`: how often a module computed on its home because the ring had no room.
    `sees_passes` False: all weights are where they are computed on, so passes are plain and not counted."""

    passes: dict[str, int]
    tiers: dict[str, TierUse]
    disk_read_nbytes: int
    disk_written_nbytes: int
    gpu_link_nbytes: int
    wait_s: float
    activations_out_nbytes: int
    activations_back_nbytes: int
    num_unleased: int
    num_plans: int
    sees_passes: bool
    executor: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        passes = ", ".join(f"{count} {name}" for name, count in self.passes.items() if count)
        since = "" if self.sees_passes else "; since then all weights are in place and passes run unseen"
        lines = [f"passes: {passes or 'none'}; waited {self.wait_s:.2f} s for weights{since}"]
        for tier, use in self.tiers.items():
            lines.append(f"  {tier:<5} peak {format_size(use.peak_nbytes):>10} of {format_size(use.limit_nbytes)}")
        lines.append(
            f"  disk: {format_size(self.disk_read_nbytes)} read, {format_size(self.disk_written_nbytes)} written; "
            f"gpu link: {format_size(self.gpu_link_nbytes)}; activations moved out: "
            f"{format_size(self.activations_out_nbytes)}"
        )
        return "\n".join(lines)
