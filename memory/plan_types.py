"""What the planner and the simulator take and give: plain records of integers. No torch, no effects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hetero.io.errors import ConfigError

STEP_NBYTES = 4096
"""Every chunk, ring and smallest budget is a multiple of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSpec:
    """What the planner knows of a chunk.

    `nbytes` is the size of its slot, `read_nbytes` what a read from its home takes from the disk. A `pinned` chunk is
    always resident in the first tier. A `by_rows` chunk is a lookup table: when it is not resident a pass reads only
    `row_read_nbytes` of it, and it never passes through a ring.
    """

    chunk_id: int
    nbytes: int
    read_nbytes: int
    pinned: bool = False
    by_rows: bool = False
    row_read_nbytes: int = 0

    def __post_init__(self) -> None:
        if self.nbytes <= 0 or self.nbytes % STEP_NBYTES:
            raise ConfigError(
                f"chunk {self.chunk_id}: its slot of {self.nbytes} bytes must be a positive multiple of {STEP_NBYTES}"
            )
        if self.read_nbytes < 0 or self.row_read_nbytes < 0:
            raise ConfigError(f"chunk {self.chunk_id}: read sizes must not be negative")


@dataclass(frozen=True, slots=True)
class Moment:
    """One step of the recorded order: the chunks it uses and its compute time with all of them present.

    `extra_nbytes` is the peak of everything that is not a chunk; the caller has taken it off the budgets already.
    """

    name: str
    chunk_ids: tuple[int, ...]
    compute_s: float
    extra_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """The moments of one pass of a phase, in order. The pass repeats.

    `starts` are the moments before which nothing can be fetched, because chunks may change until then: there the rings
    are empty, and no stay goes on. Empty: passes follow one another without a break.
    """

    phase: str
    moments: tuple[Moment, ...]
    starts: frozenset[int] = frozenset()

    @property
    def compute_s(self) -> float:
        return sum(moment.compute_s for moment in self.moments)


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes left for chunks, rings included. `gpu_nbytes` None: there is no gpu tier, the cpu tier is the first."""

    gpu_nbytes: int | None
    cpu_nbytes: int


@dataclass(frozen=True, slots=True)
class Links:
    """Measured rates of the links. `gpu_bytes_per_s` None: there is no gpu tier."""

    disk_bytes_per_s: float
    gpu_bytes_per_s: float | None = None
    disk_latency_s: float = 0.0
    gpu_latency_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("disk_bytes_per_s", "gpu_bytes_per_s"):
            rate = getattr(self, name)
            if rate is not None and not rate > 0:
                raise ConfigError(f"{name} is {rate}: a link needs a positive rate; measure it or give it")


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a steady pass should take. `bound_s` is the busiest of disk, gpu link and compute, `bottleneck` its name."""

    time_s: float
    bound_s: float
    bottleneck: str
    disk_nbytes: int
    gpu_link_nbytes: int


@dataclass(frozen=True, slots=True)
class Residents:
    """Which chunks keep a slot, and the rings for those that do not.

    `cpu_ring_nbytes` is the first tier's ring when there is no gpu tier, else the staging ring between disk and gpu.
    """

    gpu_resident: frozenset[int]
    cpu_resident: frozenset[int]
    gpu_ring_nbytes: int
    cpu_ring_nbytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The decision for one phase. `schedule` is the streamed chunks of one pass in the order they enter the first
    tier's ring; a chunk that returns later in the pass is in it again.
    """

    phase: str
    gpu_resident: frozenset[int]
    cpu_resident: frozenset[int]
    schedule: tuple[int, ...]
    gpu_ring_nbytes: int
    cpu_ring_nbytes: int
    prediction: Prediction


class BudgetError(ConfigError):
    """A tier's budget is smaller than the smallest that works, which it carries. Sizes are bytes."""

    def __init__(self, tier: str, needs_nbytes: int, has_nbytes: int, phase: str) -> None:
        self.tier = tier
        self.needs_nbytes = needs_nbytes
        self.has_nbytes = has_nbytes
        super().__init__(
            f"{phase}: {has_nbytes} bytes of {tier} memory are left for weights, the smallest that works is "
            f"{needs_nbytes}; raise {tier}_memory by at least {needs_nbytes - has_nbytes} bytes"
        )


class Use(NamedTuple):
    """One stay of a streamed chunk in the first tier's ring: from before `first_moment` to the end of `last_moment`,
    of which `num_moments` use it."""

    chunk_id: int
    first_moment: int
    last_moment: int
    num_moments: int


def uses_of(
    moments: Iterable[Sequence[int]], streamed: frozenset[int] | set[int], starts: frozenset[int] = frozenset()
) -> list[Use]:
    """Turn the chunk ids of a pass's moments into stays, in the order they enter the ring.

    A chunk stays while successive moments that stream anything use it; moments that use residents only do not end a
    stay, those in `starts` end all.
    """
    stays: list[list[int]] = []
    previous: dict[int, list[int]] = {}
    for position, chunk_ids in enumerate(moments):
        if position in starts:
            previous = {}
        current: dict[int, list[int]] = {}
        for chunk_id in chunk_ids:
            if chunk_id not in streamed or chunk_id in current:
                continue
            stay = previous.get(chunk_id)
            if stay is None:
                stay = [chunk_id, position, position, 0]
                stays.append(stay)
            stay[2] = position
            stay[3] += 1
            current[chunk_id] = stay
        if current:
            previous = current
    return [Use(*stay) for stay in stays]


def streamed_chunks(chunks: Iterable[ChunkSpec], trace: Trace, first_resident: frozenset[int]) -> frozenset[int]:
    """The chunks that a pass streams when `first_resident` are resident in the first tier. Lookup tables never."""
    used = {chunk_id for moment in trace.moments for chunk_id in moment.chunk_ids}
    return frozenset(c.chunk_id for c in chunks if c.chunk_id in used and not c.by_rows) - first_resident


def row_reads_of(chunks: Iterable[ChunkSpec], trace: Trace, resident: frozenset[int]) -> dict[int, int]:
    """Moment index -> bytes of lookup tables' rows read there: each table not in `resident` once, at its first use."""
    tables = {c.chunk_id: c.row_read_nbytes for c in chunks if c.by_rows and c.chunk_id not in resident}
    reads: dict[int, int] = {}
    for position, moment in enumerate(trace.moments):
        for chunk_id in moment.chunk_ids:
            if chunk_id in tables:
                reads[position] = reads.get(position, 0) + tables.pop(chunk_id)
    return reads
