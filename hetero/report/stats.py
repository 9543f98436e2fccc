"""What a run did: tokens, bytes per link beside the link's limit, peaks per tier beside their budgets."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

from hetero.report.timeline import Span

if TYPE_CHECKING:
    from hetero.run import Run

MAX_PASSES = 4096


@dataclass(frozen=True, slots=True)
class PassTraffic:
    """One forward pass. Bytes are useful ones: of chunks and of embedding rows."""

    phase: str
    num_tokens: int
    start_s: float
    end_s: float
    disk_nbytes: int
    gpu_link_nbytes: int
    wait_s: float

    @property
    def time_s(self) -> float:
        return self.end_s - self.start_s


class Traffic:
    """Bytes and time per pass, from differences of running totals. Keeps the last 4096 passes."""

    def __init__(self) -> None:
        self.passes: list[PassTraffic] = []
        self.num_passes = 0
        self._open: tuple[str, int, float, dict[str, float]] | None = None

    def begin(self, phase: str, num_tokens: int, totals: dict[str, float]) -> None:
        self._open = (phase, num_tokens, perf_counter(), totals)

    def end(self, totals: dict[str, float]) -> None:
        if self._open is None:
            return
        phase, num_tokens, start_s, before = self._open
        self._open = None
        self.num_passes += 1
        self.passes.append(
            PassTraffic(
                phase,
                num_tokens,
                start_s,
                perf_counter(),
                int(totals["disk"] - before["disk"]),
                int(totals["gpu link"] - before["gpu link"]),
                totals["wait_s"] - before["wait_s"],
            )
        )
        del self.passes[:-MAX_PASSES]

    @property
    def spans(self) -> list[Span]:
        return [Span(p.phase, "passes", p.start_s, p.end_s, {"tokens": p.num_tokens}) for p in self.passes]


@dataclass(frozen=True, slots=True)
class LinkStats:
    """Bytes that crossed a link in passes, their rate over the time of those passes, and the link's measured limit."""

    nbytes: int
    bytes_per_s: float | None
    limit_bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class TierStats:
    used_nbytes: int
    peak_nbytes: int
    limit_nbytes: int
    holders: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStats:
    prompt_tokens: int
    prompt_tokens_per_s: float
    generation_tokens: int
    generation_tokens_per_s: float
    num_passes: int
    disk_nbytes_per_token: float | None
    """Read in decode passes, per pass."""
    pass_s: float | None
    """Median of decode passes."""
    bound_s: float
    """What the busiest link or the compute alone would take per decode pass."""
    bottleneck: str
    links: dict[str, LinkStats]
    tiers: dict[str, TierStats]
    baseline_nbytes: int
    arena_nbytes: int
    huge_page_nbytes: int
    executor: dict[str, Any] = field(default_factory=dict)
    io: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Run) -> RunStats:
        passes = run.traffic.passes
        decode = [p for p in passes if p.phase == "decode"]
        times = sorted(p.time_s for p in decode)
        prediction, links = run.decision.plan.prediction, run.decision.links
        rates = {"disk": links.disk_bytes_per_s} | (
            {"gpu link": links.gpu_bytes_per_s} if links.gpu_bytes_per_s is not None else {}
        )
        total_s = sum(p.time_s for p in passes)
        moved = {"disk": sum(p.disk_nbytes for p in passes), "gpu link": sum(p.gpu_link_nbytes for p in passes)}
        engine = run.engine_stats()
        return cls(
            **run.token_counts(),
            num_passes=run.traffic.num_passes,
            disk_nbytes_per_token=sum(p.disk_nbytes for p in decode) / len(decode) if decode else None,
            pass_s=times[len(times) // 2] if times else None,
            bound_s=prediction.bound_s,
            bottleneck=prediction.bottleneck,
            links={
                name: LinkStats(moved[name], moved[name] / total_s if total_s else None, rate)
                for name, rate in rates.items()
            },
            tiers={
                tier: TierStats(
                    run.ledger.used(tier), run.ledger.peak(tier), run.ledger.limit(tier), run.ledger.holders(tier)
                )
                for tier in run.ledger.tiers()
            },
            baseline_nbytes=sum(run.ledger.notes().values()),
            arena_nbytes=sum(arena.nbytes for arena in run.arenas.values()),
            huge_page_nbytes=sum(getattr(arena, "huge_nbytes", 0) for arena in run.arenas.values()),
            executor=asdict(run.executor.stats),
            io={"backend": engine.backend, "cpu_s": engine.cpu_s, "read_nbytes": engine.read_nbytes,
                "written_nbytes": engine.written_nbytes},
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
