"""The memory dial: what the user wrote and what was found become one number of bytes per tier, each with its reason."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from hetero.io.errors import ConfigError
from hetero.memory.detect import Baseline, TierInfo, detect_cpu, detect_gpu, process_baseline
from hetero.memory.ledger import Ledger, LedgerEvent
from hetero.memory.sizes import format_size, parse_max_memory, parse_size

__all__ = [
    "Baseline",
    "Ledger",
    "LedgerEvent",
    "MemoryLimits",
    "TierInfo",
    "TierLimit",
    "detect_cpu",
    "detect_gpu",
    "format_size",
    "margin_nbytes",
    "parse_max_memory",
    "parse_size",
    "process_baseline",
    "resolve_budgets",
]

logger = logging.getLogger("hetero.memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierLimit:
    """The hard limit of one tier on everything hetero allocates there, and where the number came from."""

    nbytes: int
    available_nbytes: int
    """What was available when it was resolved, this process already subtracted."""
    margin_nbytes: int
    """What "auto" left for others; 0 when the user named the size."""
    source: str
    """A sentence for the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
    """The resolved dial. `gpu` is None when there is no such tier."""

    gpu: TierLimit | None
    cpu: TierLimit
    baseline: Baseline

    def ledger_limits(self) -> dict[str, int]:
        """Return the limits as `Ledger` takes them."""
        return {"cpu": self.cpu.nbytes} | ({"gpu": self.gpu.nbytes} if self.gpu else {})

    def lines(self) -> list[str]:
        """Return the sentences of the plan: one per tier, and the baseline that no budget covers."""
        lines = [f"gpu {format_size(self.gpu.nbytes)}: {self.gpu.source}"] if self.gpu else []
        lines.append(f"cpu {format_size(self.cpu.nbytes)}: {self.cpu.source}")
        lines.append(
            f"interpreter and libraries {format_size(self.baseline.total_nbytes)}, outside the budgets "
            f"({format_size(self.baseline.anonymous_nbytes)} private, "
            f"{format_size(self.baseline.file_nbytes)} mapped from files)"
        )
        return lines


def margin_nbytes(available_nbytes: int, *, is_ours_alone: bool = False) -> int:
    """Return what "auto" leaves alone: 10 %, at least 1 GiB for the other programs of a machine, but never more than a
    quarter of what is available.

    In a cgroup there is nobody to leave memory to: 10 %, at least 64 MiB, covers what libraries take beside the ledger
    (allocator slack, scratch of matrix products), so that 700 MiB are usable.
    """
    least = 64 << 20 if is_ours_alone else 1 << 30
    return max(available_nbytes // 10, min(least, available_nbytes // 4))


def resolve_budgets(
    gpu_memory: int | str = "auto",
    cpu_memory: int | str = "auto",
    *,
    gpu: TierInfo | None = None,
    cpu: TierInfo | None = None,
    baseline: Baseline | None = None,
) -> MemoryLimits:
    """Turn the two size options into hard limits.

    `gpu` is what the device reports (None: no such tier); `cpu` and `baseline` are detected when not given, so call
    this after the heavy imports. "auto" is what is available minus `margin_nbytes`; a percentage is of what is
    available; both are net of this process's own memory, which detection has already subtracted. Raises ConfigError
    when a size cannot be had: more than a GPU has free, more than the RAM that exists.
    """
    cpu = detect_cpu() if cpu is None else cpu
    baseline = process_baseline() if baseline is None else baseline
    cpu_limit = _resolve_tier("cpu_memory", cpu_memory, cpu)
    if cpu_limit.nbytes > cpu.total_nbytes:
        raise _too_much("cpu_memory", cpu_memory, cpu_limit.nbytes, cpu.total_nbytes, cpu)
    if cpu_limit.nbytes > cpu.available_nbytes:
        # RAM can still become free (other programs, page cache), so this is the user's choice to make.
        logger.warning(
            "cpu_memory=%r is more than the %s available (%s): the system may swap or end this process",
            cpu_memory,
            format_size(cpu.available_nbytes),
            cpu.limit_source,
        )
    return MemoryLimits(gpu=_resolve_gpu(gpu_memory, gpu), cpu=cpu_limit, baseline=baseline)


def _resolve_gpu(gpu_memory: int | str, gpu: TierInfo | None) -> TierLimit | None:
    if gpu is None:
        is_share = isinstance(gpu_memory, str) and gpu_memory.strip().endswith("%")
        if gpu_memory != "auto" and (is_share or parse_size(gpu_memory, name="gpu_memory", allow_zero=True) > 0):
            raise ConfigError(
                f"gpu_memory={gpu_memory!r}, but the chosen device has no gpu tier; drop the option, or choose "
                'device="cuda", "xpu" or "emulated"'
            )
        return None
    limit = _resolve_tier("gpu_memory", gpu_memory, gpu, allow_zero=True)
    if limit.nbytes > gpu.available_nbytes:
        raise _too_much("gpu_memory", gpu_memory, limit.nbytes, gpu.available_nbytes, gpu)
    return limit if limit.nbytes > 0 else None


def _resolve_tier(name: str, value: int | str, info: TierInfo, *, allow_zero: bool = False) -> TierLimit:
    available = info.available_nbytes
    text = value.strip() if isinstance(value, str) else ""
    margin = margin_nbytes(available, is_ours_alone=info.is_ours_alone) if text == "auto" else 0
    nbytes = parse_size(value, available_nbytes=available - margin, name=name, allow_zero=allow_zero or text == "auto")
    found = f"{format_size(available)} available ({info.limit_source})"
    if text == "auto":
        source = f"{found}, less a margin of {format_size(margin)}"
    elif text.endswith("%"):
        source = f"{text} of {found}"
    else:
        source = f"as asked; {found}"
    if nbytes == 0 and not allow_zero:
        raise ConfigError(f"{name}={value!r}: nothing is available ({info.limit_source}); free some memory first")
    return TierLimit(nbytes=nbytes, available_nbytes=available, margin_nbytes=margin, source=source)


def _too_much(name: str, value: int | str, nbytes: int, limit_nbytes: int, info: TierInfo) -> ConfigError:
    return ConfigError(
        f"{name}={value!r} is {format_size(nbytes)}, but only {format_size(limit_nbytes)} can be had "
        f'({info.limit_source}); ask for less, or for "auto"'
    )
