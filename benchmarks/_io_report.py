"""Tables and report of the I/O benchmark: pure arithmetic on the contenders' samples."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from _report import details, machine_facts, markdown_table, public_command, report_path, versions, write_report
from _rounds import Contender, verdict

FIO_FLOOR = 0.95
AIO_FLOOR = 1.3
_TWINS = {"io_uring": "io_uring", "threads": "psync"}
"""The engine's backends, and fio's way of doing the same."""


@dataclass(slots=True, kw_only=True)
class IOContender(Contender):
    """A contender that passes over the file with one program, one kind of buffer, in one direction."""

    program: str
    huge: bool
    write: bool
    buffer: str


@dataclass(frozen=True, slots=True)
class Setting:
    """What all contenders share."""

    path: Path
    file_nbytes: int
    block_nbytes: int
    queue_depth: int
    num_rounds: int
    num_threads: int


def find(contenders: list[IOContender], program: str, *, huge: bool, write: bool) -> IOContender | None:
    """The contender, or None where it has no samples."""
    for contender in contenders:
        if (contender.program, contender.huge, contender.write) == (program, huge, write) and contender.samples:
            return contender
    return None


def result_rows(contenders: list[IOContender]) -> list[list[str]]:
    """One row per program and direction: GB/s on both kinds of buffer, and CPU on the better one."""
    rows = []
    for program in dict.fromkeys(contender.program for contender in contenders):
        for write in (False, True):
            columns = [find(contenders, program, huge=huge, write=write) for huge in (True, False)]
            rates = [f"{column.bytes_per_s / 1e9:.2f}" if column else "-" for column in columns]
            measured = next((column for column in columns if column), None)
            cpu = f"{measured.cpu_s_per_gb:.3f}" if measured else "-"
            lever = f"{columns[0].ratio_to(columns[1]):.2f}" if columns[0] and columns[1] else "-"
            rows.append([program, "write" if write else "read", *rates, lever, cpu])
    return rows


def target_rows(contenders: list[IOContender]) -> list[list[str]]:
    rows = []
    for write in (False, True):
        direction = "write" if write else "read"
        for backend, engine in _TWINS.items():
            mine = find(contenders, f"hetero {backend}", huge=True, write=write)
            twin = f"fio {engine}"
            rows.append(
                _target(
                    f"{direction}, {backend}", mine, find(contenders, twin, huge=True, write=write), twin, FIO_FLOOR
                )
            )
        mine = find(contenders, "hetero io_uring", huge=True, write=write)
        best = best_of([c for c in contenders if c.program.startswith("DeepSpeed") and c.write == write])
        rows.append(_target(f"{direction}, io_uring", mine, best, best.program if best else "DeepSpeed aio", AIO_FLOOR))
    return rows


def best_of(contenders: list[IOContender]) -> IOContender | None:
    return max((c for c in contenders if c.samples), key=lambda c: c.bytes_per_s, default=None)


def _target(what: str, mine: IOContender | None, other: IOContender | None, against: str, floor: float) -> list[str]:
    if mine is None or other is None:
        return [what, against, "-", f"{floor:.2f}", "not measured"]
    ratio = mine.ratio_to(other)
    return [what, against, f"{ratio:.2f}", f"{floor:.2f}", verdict(ratio, floor)]


def problems(contenders: list[IOContender]) -> str:
    lines = dict.fromkeys(f"- {c.program}: {c.problem}" for c in contenders if c.problem)
    return "\n".join(lines) or "Everything was measured."


def write_io_report(
    setting: Setting, contenders: list[IOContender], peer_versions: dict[str, str], *, write: bool
) -> None:
    """Print the tables and, with `write`, write today's report."""
    machine = machine_facts(setting.path.parent)
    results = markdown_table(
        ["program", "direction", "GB/s, huge pages", "GB/s, ordinary pages", "huge/ordinary", "CPU s/GB"],
        result_rows(contenders),
    )
    targets = markdown_table(["hetero", "against", "ratio", "target", ""], target_rows(contenders))
    facts = [*machine.rows(), *versions(["hetero", "numpy"]).items(), *peer_versions.items()]
    sections = [
        ("Results", results),
        ("Against the targets (ratio of bandwidths, huge-page buffers)", targets),
        ("Not measured", problems(contenders)),
        ("Setting", _setting(setting, contenders)),
        ("Machine and versions", markdown_table(["", ""], facts)),
        ("Command", f"`{public_command(sys.argv)}`"),
        ("Samples", details("one figure a round", "\n".join(c.raw_line() for c in contenders if c.samples))),
    ]
    print(results, targets, problems(contenders), sep="\n\n")
    if write:
        path = report_path("io", machine)
        write_report(path, "The I/O engine beside fio and DeepSpeed's aio", sections)
        print(f"\nwritten: {path}")


def _setting(setting: Setting, contenders: list[IOContender]) -> str:
    buffers = dict.fromkeys(f"- {c.program}, {'huge' if c.huge else 'ordinary'} pages: {c.buffer}" for c in contenders)
    return (
        f"A file of {setting.file_nbytes / 2**30:g} GiB of random bytes, whole passes with O_DIRECT, blocks of "
        f"{setting.block_nbytes / 2**20:g} MiB, {setting.queue_depth} in flight (psync and the threads backend: "
        f"{setting.num_threads} blocking threads, one part of the file each). "
        f"{setting.num_rounds} rounds after one that is thrown away; every "
        "other round goes backwards. hetero: one request a block, and as many buffers as blocks in flight (two for "
        "each blocking thread). DeepSpeed: block size/queue depth/threads, one request for the whole file.\n\n"
        "CPU: user and system seconds per GB, on huge pages where both were measured; of the whole process for hetero "
        "and DeepSpeed, of its I/O threads for fio, which fills its buffers in that time. Kernel threads are in none."
        "\n\n"
        "Buffers:\n\n" + "\n".join(buffers)
    )
