"""Deciding from headers: what everything needs, what is left for weights, which layout and plan are fastest."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from hetero.io.arena import round_up
from hetero.io.errors import ConfigError
from hetero.layout import Layout, build_layout
from hetero.materialize import scratch_need
from hetero.measure import ComputeRates
from hetero.memory.budget import MemoryLimits, format_size
from hetero.memory.plan import make_plan, predict, smallest_budgets
from hetero.memory.plan_types import BudgetError, Budgets, ChunkSpec, Links, Plan, Prediction, Trace
from hetero.memory.residency import BLOCK_NBYTES
from hetero.memory.simulate import simulate
from hetero.memory.sizes import format_need
from hetero.report.schema import PhasePlan, PlanDict, TierPlan
from hetero.sources import Source

CHUNK_SIZES = tuple((1 << 25) >> step for step in range(8))  # 32 MiB down to 256 KiB
PREFILL_TOKENS = 512
ROWS_NBYTES = 1 << 20
DISK_WINDOW_NBYTES = 32 << 20  # eight blocks of 4 MiB, the engine's queue depth
WORTH_A_SMALLER_CHUNK = 0.98  # smaller chunks mean more requests and more Python; they must gain at least 2 %


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a config decides the bytes beside the weights."""

    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    is_eager: bool
    """Attention materialises its scores."""

    @classmethod
    def of(cls, config: Any) -> Shape:
        text = config.get_text_config()
        hidden, heads = text.hidden_size, text.num_attention_heads
        experts = getattr(text, "num_experts_per_tok", None) or 1
        inner = getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None)
        inner = inner or getattr(text, "ffn_dim", None) or 4 * hidden
        return cls(
            num_layers=text.num_hidden_layers,
            hidden=hidden,
            intermediate=inner * experts,
            num_heads=heads,
            num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or hidden // heads,
            vocab=text.vocab_size,
            max_positions=getattr(text, "max_position_embeddings", None) or 1 << 30,
            is_eager=getattr(text, "_attn_implementation", None) == "eager",
        )

    def kv_nbytes(self, context: int, itemsize: int) -> int:
        """Keys and values of `context` tokens, and one layer's again while its tensor grows."""
        return 2 * (self.num_layers + 1) * self.num_kv_heads * self.head_dim * context * itemsize

    def activation_nbytes(self, num_tokens: int, context: int, itemsize: int) -> int:
        """Upper estimate of what one layer holds at a time, and the logits of one position."""
        attention = 2 * (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        per_token = (6 * self.hidden + 3 * self.intermediate + attention) * itemsize + context
        scores = 3 * self.num_heads * context * 4 if self.is_eager else 0
        return num_tokens * (per_token + scores) + 3 * self.vocab * 4


@dataclass(slots=True)
class Reserves:
    """Bytes per tier and holder of everything that is not a chunk."""

    holders: dict[str, dict[str, int]] = field(default_factory=lambda: {"gpu": {}, "cpu": {}})

    def add(self, tier: str, holder: str, nbytes: int) -> None:
        if nbytes:
            self.holders[tier][holder] = self.holders[tier].get(holder, 0) + round_up(nbytes)

    def nbytes(self, tier: str) -> int:
        return sum(self.holders[tier].values())


@dataclass(slots=True)
class Decision:
    """A layout and a plan that fit the limits, with everything they were decided from."""

    source: Source
    layout: Layout
    specs: list[ChunkSpec]
    trace: Trace
    plan: Plan
    prefill: Prediction
    limits: MemoryLimits
    reserves: Reserves
    scratch_nbytes: int
    links: Links
    context: int
    prefill_tokens: int
    device_name: str

    @property
    def has_gpu_tier(self) -> bool:
        return self.limits.gpu is not None

    def measured(self, trace: Trace) -> None:
        """Predict again with the compute times that the warm-up measured. What is resident stays so."""
        simulation = simulate(self.plan, self.specs, trace, self.links, with_spans=False)
        self.trace = trace
        self.plan = replace(self.plan, prediction=predict(simulation, trace, self.links))

    @property
    def first_tier(self) -> str:
        return "gpu" if self.has_gpu_tier else "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the caller fixed: how long texts get, and how prompts and weights are cut (both None: we choose)."""

    context: int
    prefill_tokens: int = PREFILL_TOKENS
    chunk_nbytes: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("context", self.context), ("prefill_tokens", self.prefill_tokens)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1 token, got {value}")
        if self.chunk_nbytes is not None and self.chunk_nbytes < 4096:
            raise ConfigError(f"chunk_nbytes must be at least 4096, got {self.chunk_nbytes}")


def decide(
    source: Source,
    model: nn.Module,
    *,
    limits: MemoryLimits,
    links: Links,
    rates: ComputeRates,
    wishes: Wishes,
    io_nbytes: int,
    device_name: str,
    is_remote: bool = False,
) -> Decision:
    """Choose chunk size, residents and rings. `is_remote`: the first tier is not RAM, so what goes there passes through
    RAM. Raises ConfigError naming the smallest budgets when nothing fits."""
    shape = Shape.of(source.config)
    if wishes.context > shape.max_positions:
        raise ConfigError(
            f"context={wishes.context} is more than the {shape.max_positions} positions this model was trained for; "
            f"use context={shape.max_positions} or less"
        )
    best: Decision | None = None
    smallest: dict[str, int] | None = None
    for layout in _layouts(source, model, wishes):
        scratch = _scratch_nbytes(layout)
        reserves = _reserves(source, model, shape, layout, scratch, wishes, io_nbytes, limits, is_remote)
        specs = layout.specs()
        trace = layout.trace("decode", rates.compute_s(layout, 1))
        try:
            plan = _plan(specs, trace, _left(limits, reserves), links)
        except BudgetError:
            smallest = _less(smallest, _smallest(specs, trace, limits, reserves))
            continue
        if best is None or plan.prediction.time_s < WORTH_A_SMALLER_CHUNK * best.plan.prediction.time_s:
            prefill_trace = layout.trace("prefill", rates.compute_s(layout, min(wishes.prefill_tokens, wishes.context)))
            best = Decision(
                source=source,
                layout=layout,
                specs=specs,
                trace=trace,
                plan=plan,
                prefill=predict(simulate(plan, specs, prefill_trace, links, with_spans=False), prefill_trace, links),
                limits=limits,
                reserves=reserves,
                scratch_nbytes=scratch,
                links=links,
                context=wishes.context,
                prefill_tokens=wishes.prefill_tokens,
                device_name=device_name,
            )
        if best is not None and not best.plan.schedule:
            break  # everything is resident
    if best is None:
        assert smallest is not None
        raise _too_small(smallest, limits, wishes)
    return best


def _layouts(source: Source, model: nn.Module, wishes: Wishes) -> Iterator[Layout]:
    if wishes.chunk_nbytes is not None:
        yield build_layout(source, model, wishes.chunk_nbytes)
        return
    whole = build_layout(source, model, max(1, max((p.nbytes for p in source.params), default=1)))
    yield whole
    previous = [chunk.nbytes for chunk in whole.chunks]
    for chunk_nbytes in CHUNK_SIZES:
        layout = build_layout(source, model, chunk_nbytes)
        sizes = [chunk.nbytes for chunk in layout.chunks]
        if sizes != previous:
            yield layout
        previous = sizes


def _scratch_nbytes(layout: Layout) -> int:
    """The most that one module's weights need at a time. A split weight needs one block's worth."""
    largest = 0
    for weight in layout.weights.values():
        rows = weight.first_rows[1] if weight.is_split else None
        need = scratch_need(weight, rows)
        largest = max(largest, need.numbers_nbytes + need.work_nbytes)
    return largest


def _reserves(
    source: Source,
    model: nn.Module,
    shape: Shape,
    layout: Layout,
    scratch_nbytes: int,
    wishes: Wishes,
    io_nbytes: int,
    limits: MemoryLimits,
    is_remote: bool,
) -> Reserves:
    first = "gpu" if limits.gpu is not None else "cpu"
    itemsize = source.dtype.itemsize
    reserves = Reserves()
    small = sum(max(p.nbytes, _numel(p.shape) * itemsize) + 64 for p in layout.small)
    reserves.add(first, "small weights", small)
    reserves.add(first, "buffers", sum(buffer.nbytes for buffer in model.buffers()))
    reserves.add(first, "kv cache", shape.kv_nbytes(wishes.context, itemsize))
    num_tokens = min(wishes.prefill_tokens, wishes.context)
    reserves.add(first, "activations", shape.activation_nbytes(num_tokens, wishes.context, itemsize))
    reserves.add(first, "dequantisation", scratch_nbytes)
    reserves.add("cpu", "i/o bounce buffers", io_nbytes)
    reserves.add("cpu", "placeholder", BLOCK_NBYTES)
    if is_remote:
        reserves.add("cpu", "small weights on their way", 2 * small)
    reserves.add("cpu", "embedding rows", ROWS_NBYTES)
    return reserves


def _numel(shape: tuple[int, ...]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel


def _plan(specs: list[ChunkSpec], trace: Trace, budgets: Budgets, links: Links) -> Plan:
    """Plan with a ring that is larger, by the disk's window, than the one the simulation finds best.

    The simulated disk runs at its full rate with one read; a real one needs several in flight, and chunks of several
    sizes leave gaps in a ring. The window is at most an eighth of the tier, and none where nothing would fit then.
    """
    plan = make_plan(specs, trace, budgets, links)
    window = min(DISK_WINDOW_NBYTES, budgets.cpu_nbytes // 8 // 4096 * 4096)
    if not plan.prediction.disk_nbytes or not plan.schedule or not window:
        return plan
    try:
        plan = make_plan(specs, trace, Budgets(budgets.gpu_nbytes, budgets.cpu_nbytes - window), links)
    except BudgetError:
        return plan
    return replace(plan, cpu_ring_nbytes=plan.cpu_ring_nbytes + window)


def _left(limits: MemoryLimits, reserves: Reserves) -> Budgets:
    gpu = None if limits.gpu is None else max(0, limits.gpu.nbytes - reserves.nbytes("gpu"))
    return Budgets(gpu, max(0, limits.cpu.nbytes - reserves.nbytes("cpu")))


def _smallest(specs: list[ChunkSpec], trace: Trace, limits: MemoryLimits, reserves: Reserves) -> dict[str, int]:
    budgets = smallest_budgets(specs, trace, gpu=limits.gpu is not None)
    needs = {"cpu": budgets.cpu_nbytes + reserves.nbytes("cpu")}
    if budgets.gpu_nbytes is not None:
        needs["gpu"] = budgets.gpu_nbytes + reserves.nbytes("gpu")
    return needs


def _less(old: dict[str, int] | None, new: dict[str, int]) -> dict[str, int]:
    if old is None:
        return new
    return min(old, new, key=lambda needs: (sum(needs.values()), needs.get("gpu", 0)))


class TooSmallError(ConfigError):
    """The budgets cannot hold the model. `needs` are the smallest that work, in bytes per tier."""

    def __init__(self, message: str, needs: dict[str, int]) -> None:
        self.needs = needs
        super().__init__(message)


def _too_small(needs: dict[str, int], limits: MemoryLimits, wishes: Wishes) -> TooSmallError:
    has = limits.ledger_limits()
    lines = []
    for tier, nbytes in needs.items():
        if nbytes > has[tier]:
            lines.append(f"{tier}_memory is {has[tier]} bytes ({format_size(has[tier])}), it needs {nbytes}")
    least = ", ".join(f"{tier}_memory={nbytes} ({format_need(nbytes)})" for tier, nbytes in sorted(needs.items()))
    return TooSmallError(
        f"the budgets are too small for this model with a context of {wishes.context} tokens: {'; '.join(lines)}. "
        f"The smallest that works is {least}; a shorter context or fewer prefill tokens need less",
        needs,
    )


class PlanReport:
    """A decision as a person or a program reads it."""

    def __init__(self, decision: Decision) -> None:
        self.decision = decision

    def to_dict(self) -> PlanDict:
        d = self.decision
        return {
            "model": os.fspath(d.source.path),
            "total_nbytes": sum(param.nbytes for param in d.source.params),
            "dtype": str(d.source.dtype).removeprefix("torch."),
            "device": d.device_name,
            "context": d.context,
            "num_chunks": len(d.layout.chunks),
            "chunk_nbytes": max((chunk.nbytes for chunk in d.layout.chunks), default=0),
            "tiers": list(self._tiers()),
            "phases": [
                self._phase("prefill", d.prefill, min(d.prefill_tokens, d.context)),
                self._phase("decode", d.plan.prediction, 1),
            ],
            "notes": d.limits.lines(),
        }

    def _tiers(self) -> Iterator[TierPlan]:
        d = self.decision
        sizes = {spec.chunk_id: spec.nbytes for spec in d.specs}
        used = {chunk_id for moment in d.trace.moments for chunk_id in moment.chunk_ids}
        has = d.limits.ledger_limits()
        streamed = set(d.plan.schedule)
        for tier in ("gpu", "cpu"):
            if tier not in has:
                continue
            resident = d.plan.gpu_resident if tier == "gpu" else d.plan.cpu_resident
            is_source = tier == "cpu" and d.has_gpu_tier
            yield {
                "tier": tier,
                "limit_nbytes": has[tier],
                "resident_nbytes": sum(sizes[i] for i in resident),
                "ring_nbytes": d.plan.gpu_ring_nbytes if tier == "gpu" else d.plan.cpu_ring_nbytes,
                "other_nbytes": d.reserves.nbytes(tier),
                "streamed_nbytes": sum(sizes[i] for i in streamed & resident) if is_source else 0,
                "link_bytes_per_s": d.links.gpu_bytes_per_s if is_source else None,
            }
        on_disk = used - d.plan.gpu_resident - d.plan.cpu_resident
        yield {
            "tier": "disk",
            "limit_nbytes": None,
            "resident_nbytes": sum(sizes[i] for i in on_disk),
            "ring_nbytes": None,
            "other_nbytes": None,
            "streamed_nbytes": sum(sizes[i] for i in on_disk & streamed),
            "link_bytes_per_s": d.links.disk_bytes_per_s,
        }

    def _phase(self, name: str, prediction: Prediction, num_tokens: int) -> PhasePlan:
        return {
            "phase": name,
            "num_tokens": num_tokens,
            "disk_nbytes": prediction.disk_nbytes,
            "gpu_link_nbytes": prediction.gpu_link_nbytes,
            "time_s": prediction.time_s,
            "bound_s": prediction.bound_s,
            "bottleneck": prediction.bottleneck,
            "tokens_per_s": num_tokens / prediction.time_s if prediction.time_s > 0 else None,
        }

    def __str__(self) -> str:
        from io import StringIO

        from rich.console import Console

        from hetero.cli.render import print_plan

        text = StringIO()
        print_plan(Console(file=text, width=120), self.to_dict())
        return text.getvalue()


def formats_of(source: Source) -> set[str]:
    return {param.format for param in source.params}
