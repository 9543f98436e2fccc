"""Turn plans, statistics and checks into text. Knows the dictionaries, not the objects they come from."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.box import SIMPLE
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table
from rich.text import Text

from hetero.memory.sizes import format_time

if TYPE_CHECKING:
    from hetero.cli.doctor import Check
    from hetero.report.schema import PhasePlan, PlanDict, StatsDict, TierPlan

_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_DECIMAL_UNITS = ("B/s", "kB/s", "MB/s", "GB/s", "TB/s")
_STATUS_STYLES = {"ok": "green", "note": "dim", "warn": "yellow", "fail": "bold red"}


def output_console() -> Console:
    """Return a console on the stdout of this moment."""
    return Console(soft_wrap=False)


def error_console() -> Console:
    """Return a console on the stderr of this moment."""
    return Console(stderr=True)


def install_logging(level: str) -> None:
    """Send the records of hetero's own loggers to stderr; the root logger stays untouched."""
    logger = logging.getLogger("hetero")
    for handler in [handler for handler in logger.handlers if isinstance(handler, RichHandler)]:
        logger.removeHandler(handler)
    logger.addHandler(RichHandler(console=error_console(), show_path=False, show_time=False))
    logger.setLevel(level.upper())


def format_nbytes(nbytes: float) -> str:
    """Write a size with one decimal in binary units: 1536 -> "1.5 KiB"."""
    return _scaled(nbytes, 1024, _BINARY_UNITS)


def format_rate(bytes_per_s: float) -> str:
    """Write a bandwidth with one decimal in decimal units, as disks and links are sold: 3.9e9 -> "3.9 GB/s"."""
    return _scaled(bytes_per_s, 1000, _DECIMAL_UNITS)


def _scaled(value: float, step: int, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        # Compared as it will be printed, so that 1023.96 KiB becomes "1.0 MiB" and not "1024.0 KiB".
        if round(value, 1) < step:
            return f"{value:.0f} {unit}" if unit == units[0] else f"{value:.1f} {unit}"
        value /= step
    return f"{value:.1f} {units[-1]}"


def stats_line(stats: StatsDict) -> str:
    """Say in one line how fast a run was, each link beside its limit, a pass beside its bound, how much memory sits on
    huge pages, and the peak of each tier beside its budget."""
    parts = [
        f"{stats['prompt_tokens']} prompt tokens at {stats['prompt_tokens_per_s']:.1f}/s",
        f"{stats['generation_tokens']} generation tokens at {stats['generation_tokens_per_s']:.1f}/s",
    ]
    for name, link in stats["links"].items():
        limit = link["limit_bytes_per_s"]
        of_limit = f" of {format_rate(limit)}" if limit else ""
        parts.append(f"{name} {format_rate(link['bytes_per_s'] or 0)}{of_limit}")
    if stats["pass_s"]:
        took = f"a pass took {format_time(stats['pass_s'])}"
        if stats["bound_s"] <= stats["pass_s"]:  # else the rates it comes from were taken on a busy machine
            took += f", {format_time(stats['bound_s'])} of {stats['bottleneck']} at least"
        parts.append(took)
    huge, arenas = format_nbytes(stats["huge_page_nbytes"]), format_nbytes(stats["arena_nbytes"])
    parts.append(f"{huge} of {arenas} on huge pages")
    peaks = [
        f"{name} {format_nbytes(tier['peak_nbytes'])} of {format_nbytes(tier['limit_nbytes'])}"
        for name, tier in stats["tiers"].items()
    ]
    return "; ".join([*parts, "peak " + ", ".join(peaks)])


def print_plan(console: Console, plan: PlanDict) -> None:
    """Print a plan: a table of the tiers, a table of the phases, and what would help."""
    summary = f"{format_nbytes(plan['total_nbytes'])} in {plan['dtype']} on {plan['device']}"
    console.print(f"{plan['model']}: {summary}, context {plan['context']}", soft_wrap=True, highlight=False)
    console.print(_tier_table(plan["tiers"]))
    console.print(_phase_table(plan["phases"]))
    for note in plan["notes"]:
        console.print(note, soft_wrap=True, highlight=False)


def _table(title: str, *columns: str) -> Table:
    """Return a table whose first column holds names and whose others hold figures; it fits 80 columns."""
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0), show_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right", no_wrap=True)
    return table


def _tier_table(tiers: Iterable[TierPlan]) -> Table:
    table = _table("Placement", "tier", "budget", "resident", "ring", "other", "streamed", "over a link of")
    for tier in tiers:
        sizes = (
            tier["limit_nbytes"],
            tier["resident_nbytes"],
            tier["ring_nbytes"],
            tier["other_nbytes"],
            tier["streamed_nbytes"],
        )
        link = tier["link_bytes_per_s"]
        table.add_row(
            tier["tier"],
            *("-" if size is None else format_nbytes(size) for size in sizes),
            format_rate(link) if link else "-",
        )
    return table


def _phase_table(phases: Iterable[PhasePlan]) -> Table:
    table = _table("Expected per pass", "phase", "tokens", "disk", "gpu link", "time", "bound", "limit is", "tokens/s")
    for phase in phases:
        tokens_per_s = phase["tokens_per_s"]
        table.add_row(
            phase["phase"],
            str(phase["num_tokens"]),
            format_nbytes(phase["disk_nbytes"]),
            format_nbytes(phase["gpu_link_nbytes"]),
            format_time(phase["time_s"]),
            format_time(phase["bound_s"]),
            phase["bottleneck"],
            "-" if tokens_per_s is None else f"{tokens_per_s:.2f}",
        )
    return table


def print_checks(console: Console, checks: Iterable[Check]) -> None:
    """Print the findings of `hetero doctor`, with its advice under what is wrong."""
    table = Table.grid(padding=(0, 2))
    for check in checks:
        status = Text(check.status, style=_STATUS_STYLES[check.status])
        detail = Text(check.value)
        if check.advice:
            detail.append(f"\n{check.advice}", style="yellow")
        table.add_row(status, check.name, detail)
    console.print(table)
