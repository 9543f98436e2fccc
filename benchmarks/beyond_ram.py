"""Decode a model that is larger than the memory limit: hetero beside the systems people use today.

Each system runs in a process that starts inside a memory cgroup of its own, from a cold page cache, the systems in
turn (A B C D A B C D ...), on the same weights, prompt and threads. After each run of hetero the disk is measured:
direct reads of the same files into huge pages, the larger of hetero's own engine and fio. The bound is what hetero
streams per token at that rate.

Needs Linux and root, about 6 GB of disk for a model it makes itself from a seed, and an interpreter that has the peers
(torch, transformers, accelerate, llama-cpp-python). About 25 minutes; --quick is one repetition of the main case.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

from _cgroup import CgroupUnavailableError, MemoryCgroup, drop_page_cache, find_parent
from _models import GGUF_NAME, weight_nbytes
from _report import (
    REPORTS,
    details,
    machine_facts,
    markdown_table,
    public_command,
    report_path,
    versions,
    write_report,
)
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
WORKER = HERE / "_beyond_ram_worker.py"
LIMITS = "1536MiB,700MiB,40%,60%,80%,95%"
SYSTEMS = ("hetero", "accelerate", "mmap", "llama.cpp")
NEEDS = {
    "hetero": ("torch", "transformers"),
    "accelerate": ("torch", "transformers", "accelerate"),
    "mmap": ("torch", "transformers"),
    "llama.cpp": ("llama_cpp",),
}
DESCRIPTIONS = {
    "hetero": 'hetero, device="cpu", cpu_memory="auto"',
    "accelerate": "accelerate, device_map auto, rest on disk",
    "mmap": "transformers, plain mmap",
    "llama.cpp": "llama.cpp, mmap of a BF16 GGUF",
}
TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One process: a system under a limit. `result` is the worker's JSON, empty when it failed."""

    system: str
    limit: str
    limit_nbytes: int
    repetition: int
    failure: str | None
    cgroup_peak_nbytes: int | None
    wall_s: float
    result: dict[str, Any]
    disk_bytes_per_s: dict[str, float | None] = field(default_factory=dict)
    """Measured just after a run of hetero, by method."""

    @property
    def token_s(self) -> float:
        """Median decode step; the first step reads the prompt and does not count."""
        return float(median(self.result["step_s"][1:]))

    @property
    def device_nbytes(self) -> float:
        """Device bytes read per decode step, of this process, mean."""
        steps = self.result["step_process_nbytes"][1:]
        return float(sum(steps)) / len(steps)

    @property
    def bound_s(self) -> float:
        best = max(rate for rate in self.disk_bytes_per_s.values() if rate is not None)
        return float(self.result["extra"]["streamed_nbytes"]) / best


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be run: the files, an interpreter per system (None: not installed), limits in order."""

    model: Path
    gguf: Path | None
    workdir: Path
    interpreters: dict[str, str | None]
    limits: list[tuple[str, int]]
    num_repetitions: int
    num_tokens: int
    num_threads: int
    accelerate_nbytes: int | None


def main() -> None:
    options = parse_options()
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, 120)
    try:
        version, _ = find_parent()
    except CgroupUnavailableError as error:
        refuse(str(error))
    plan = make_plan(options)
    model_nbytes = weight_nbytes(plan.model)
    console.print(f"model {model_nbytes / 1e9:.2f} GB, memory cgroup v{version}, {plan.num_threads} threads")
    for system, interpreter in plan.interpreters.items():
        if interpreter is None:
            console.print(f"[yellow]{system}: not installed[/]")
    samples: list[Sample] = []
    for sample in measure(plan):
        samples.append(sample)
        told = sample.failure or f"{sample.token_s:.3f} s/token, {sample.device_nbytes / 1e9:.2f} GB/token"
        console.print(f"[dim]{sample.limit} #{sample.repetition} {sample.system}: {told}[/]")
    complaints = list(complain(samples))
    for limit, _ in plan.limits:
        print_table(console, limit, plan.interpreters, rows_of(limit, samples, plan))
        bound = bound_row(limit, samples)
        if bound:
            console.print(
                "  ".join(f"{name} {value}" for name, value in zip(BOUND_HEADERS[1:], bound[1:], strict=True))
            )
    console.print(parity(samples))
    path = save_report(plan, samples, complaints, model_nbytes, version, options.report_dir)
    console.print(f"report: {path}")
    for complaint in complaints:
        console.print(f"[red]{complaint}[/]")
    sys.exit(1 if complaints else 0)


def refuse(message: str) -> NoReturn:
    sys.stderr.write(f"beyond_ram: {message}\n")
    sys.exit(2)


# -- what to run ------------------------------------------------------------------------------------------------------


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", type=Path, default=HERE.parent / "build" / "bench", help="where the model lies")
    parser.add_argument("--model", type=Path, help="a checkpoint to use instead of making one")
    parser.add_argument("--gguf", type=Path, help="its BF16 GGUF")
    parser.add_argument("--peers-python", help="an interpreter that has the peers (default: this one)")
    parser.add_argument("--limits", default=LIMITS, help="memory limits; a percentage is of the model (%(default)s)")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help=f"some of {','.join(SYSTEMS)}")
    parser.add_argument("--reps", type=int, default=3, help="processes per system and limit")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--accelerate-cpu", help="accelerate's CPU share, like 400MiB (default: see the report)")
    parser.add_argument("--quick", action="store_true", help="the first limit only, one repetition of 4 tokens")
    parser.add_argument("--report-dir", type=Path, help="default: benchmarks/reports; with --quick, the workdir")
    options = parser.parse_args()
    if options.quick:
        options.limits = options.limits.partition(",")[0]
        options.reps, options.tokens = 1, 4
    if options.reps < 1 or options.tokens < 2:
        parser.error("--reps must be at least 1 and --tokens at least 2: the first token comes from the prompt")
    unknown = set(options.systems.split(",")) - set(SYSTEMS)
    if unknown:
        parser.error(f"--systems: {', '.join(sorted(unknown))} is none of {', '.join(SYSTEMS)}")
    if options.report_dir is None:
        options.report_dir = options.workdir if options.quick else REPORTS
    return options


def make_plan(options: argparse.Namespace) -> Plan:
    python = options.peers_python
    if python and not os.access(python, os.X_OK):
        refuse(f"--peers-python {python} is not an interpreter that can be started")
    chosen = options.systems.split(",")
    interpreters = {
        system: find_interpreter(system, [sys.executable] if system == "hetero" else [python, sys.executable])
        for system in SYSTEMS
        if system in chosen
    }
    model, gguf = options.model, options.gguf
    if model is None:
        wants_gguf = gguf is None and interpreters.get("llama.cpp") is not None
        make_model(options.workdir, wants_gguf)
        model = options.workdir / "llama"
        gguf = gguf or options.workdir / GGUF_NAME
    try:
        limits = [(text, limit_nbytes(text, weight_nbytes(model))) for text in options.limits.split(",")]
        share = limit_nbytes(options.accelerate_cpu, 0) if options.accelerate_cpu else None
    except ValueError as error:
        refuse(str(error))
    return Plan(
        model, gguf, options.workdir, interpreters, limits, options.reps, options.tokens, options.threads, share
    )


def find_interpreter(system: str, candidates: Iterable[str | None]) -> str | None:
    """The first interpreter that has what `system` needs; it is asked, so that a missing peer is never a guess."""
    code = "import importlib.util, sys; sys.exit(any(importlib.util.find_spec(n) is None for n in sys.argv[1:]))"
    for python in candidates:
        if python and subprocess.run([python, "-c", code, *NEEDS[system]], check=False).returncode == 0:
            return python
    return None


def make_model(workdir: Path, wants_gguf: bool) -> None:
    """In a process of its own: what torch maps in this one would stay cached and free of charge for the systems."""
    workdir.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(HERE / "_models.py"), str(workdir), *(["--gguf"] if wants_gguf else [])]
    subprocess.run(command, check=True)


def limit_nbytes(text: str, model_nbytes: int) -> int:
    """Bytes of "1536MiB", "2GiB" or a share of the model, "40%". Raises ValueError."""
    for unit, factor in (("MiB", 1 << 20), ("GiB", 1 << 30), ("%", model_nbytes / 100)):
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * factor) // 4096 * 4096
    raise ValueError(f"{text!r} is not a limit like 700MiB, 1.5GiB or 40%")


# -- running ----------------------------------------------------------------------------------------------------------


def measure(plan: Plan) -> Iterator[Sample]:
    for limit, nbytes in plan.limits:
        for repetition in range(1, plan.num_repetitions + 1):
            for system, python in plan.interpreters.items():
                if python is not None:
                    yield run_one(plan, system, python, limit, nbytes, repetition)


def run_one(plan: Plan, system: str, python: str, limit: str, nbytes: int, repetition: int) -> Sample:
    model = plan.gguf if system == "llama.cpp" else plan.model
    if model is None or not model.exists():
        return Sample(system, limit, nbytes, repetition, "no GGUF: name one with --gguf", None, 0.0, {})
    share = plan.accelerate_nbytes or accelerate_share(nbytes)
    command = [
        python, str(WORKER), system, str(model), "--tokens", str(plan.num_tokens), "--threads", str(plan.num_threads),
        "--peer-cpu-nbytes", str(share), "--scratch", str(plan.workdir),
    ]  # fmt: skip
    drop_page_cache()
    with MemoryCgroup(nbytes) as group:
        done = group.run(command, env=worker_env(), timeout_s=TIMEOUT_S)
    failure = done.failure
    result = {} if failure else json.loads(done.stdout.splitlines()[-1])
    rates = disk_rates(plan) if system == "hetero" and not failure else {}
    return Sample(system, limit, nbytes, repetition, failure, done.peak_nbytes, done.wall_s, result, rates)


def accelerate_share(limit_nbytes: int) -> int:
    """Bytes of weights that accelerate keeps in RAM: the most that was seen to work at 700 MiB, more where there is."""
    return max(400 << 20, limit_nbytes - (1100 << 20))


def worker_env() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(HERE.parent), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


def disk_rates(plan: Plan) -> dict[str, float | None]:
    command = [sys.executable, str(WORKER), "bandwidth", str(plan.model)]
    done = subprocess.run(command, env=worker_env(), capture_output=True, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    return {"hetero's engine": result["engine_bytes_per_s"], "fio": result["fio_bytes_per_s"]}


# -- judging ----------------------------------------------------------------------------------------------------------


def complain(samples: Sequence[Sample]) -> Iterator[str]:
    """What makes this run a failure: hetero not running, or other tokens than transformers."""
    for sample in samples:
        if sample.system == "hetero" and sample.failure:
            yield f"hetero failed at {sample.limit}: {sample.failure}"
    tokens = tokens_of(samples)
    if len(tokens["hetero"]) > 1:
        yield f"hetero's tokens differ between runs: {sorted(tokens['hetero'])}"
    if tokens["hetero"] and tokens["mmap"] and tokens["hetero"] != tokens["mmap"]:
        yield f"hetero's tokens {sorted(tokens['hetero'])} are not transformers' {sorted(tokens['mmap'])}"


def tokens_of(samples: Sequence[Sample]) -> dict[str, set[tuple[int, ...]]]:
    found: dict[str, set[tuple[int, ...]]] = {system: set() for system in SYSTEMS}
    for sample in samples:
        if not sample.failure:
            found[sample.system].add(tuple(sample.result["tokens"]))
    return found


def parity(samples: Sequence[Sample]) -> str:
    tokens = tokens_of(samples)
    if not tokens["hetero"] or not tokens["mmap"]:
        return "greedy tokens: not compared, hetero or transformers gave none"
    verdict = "equal" if tokens["hetero"] == tokens["mmap"] and len(tokens["hetero"]) == 1 else "DIFFERENT"
    return f"greedy tokens of hetero and of transformers (mmap), all runs: {verdict}: {list(min(tokens['hetero']))}"


HEADERS = (
    "system", "s/token", "range", "times hetero", "GB/s of weights", "device GB/token", "peak RSS MiB",
    "cgroup peak MiB", "load s",
)  # fmt: skip


def rows_of(limit: str, samples: Sequence[Sample], plan: Plan) -> list[list[str]]:
    model_nbytes = weight_nbytes(plan.model)
    ours = [s.token_s for s in samples if s.limit == limit and s.system == "hetero" and not s.failure]
    rows = []
    for system, python in plan.interpreters.items():
        here = [s for s in samples if s.limit == limit and s.system == system]
        good = [s for s in here if not s.failure]
        failures = sorted({s.failure for s in here if s.failure})
        if not good:
            told = "not installed" if python is None else "; ".join(failures)
            rows.append([DESCRIPTIONS[system], told, *("-" for _ in HEADERS[2:])])
            continue
        times = [s.token_s for s in good]
        peaks = [s.cgroup_peak_nbytes for s in good if s.cgroup_peak_nbytes is not None]
        rows.append(
            [
                DESCRIPTIONS[system]
                + (f" ({len(failures)} of {len(here)} runs failed: {failures[0]})" if failures else ""),
                f"{median(times):.3f}",
                f"{min(times):.3f}-{max(times):.3f}",
                f"{median(times) / median(ours):.2f}" if ours else "-",
                f"{model_nbytes / median(times) / 1e9:.2f}",
                f"{median(s.device_nbytes for s in good) / 1e9:.2f}",
                f"{median(s.result['peak_rss_nbytes'] for s in good) / 2**20:.0f}",
                f"{max(peaks) / 2**20:.0f}" if peaks else "-",
                f"{median(s.result['load_s'] for s in good):.1f}",
            ]
        )
    return rows


BOUND_HEADERS = ("limit", "streamed GB/token", "disk GB/s", "measured by", "bound s/token", "reached")


def bound_row(limit: str, samples: Sequence[Sample]) -> list[str] | None:
    good = [s for s in samples if s.limit == limit and s.system == "hetero" and not s.failure]
    if not good:
        return None
    streamed = median(s.result["extra"]["streamed_nbytes"] for s in good)
    rates = {
        name: median(found)
        for name in good[0].disk_bytes_per_s
        if (found := [rate for s in good if (rate := s.disk_bytes_per_s[name]) is not None])
    }
    best = max(rates, key=lambda name: rates[name])
    others = ", ".join(f"{name} {rate / 1e9:.2f}" for name, rate in rates.items() if name != best)
    return [
        limit,
        f"{streamed / 1e9:.2f}",
        f"{rates[best] / 1e9:.2f}",
        best + (f" ({others})" if others else ""),
        f"{median(s.bound_s for s in good):.3f}",
        f"{median(s.bound_s / s.token_s for s in good):.2f}",
    ]


def print_table(console: Console, limit: str, systems: Iterable[str], rows: list[list[str]]) -> None:
    table = Table(title=f"memory limit {limit}", title_justify="left")
    for number, header in enumerate(HEADERS):
        table.add_column(header, justify="right" if number else "left")
    for row, system in zip(rows, systems, strict=True):
        table.add_row(system, *row[1:])
    console.print(table)


# -- the report -------------------------------------------------------------------------------------------------------


def save_report(
    plan: Plan, samples: list[Sample], complaints: list[str], model_nbytes: int, version: int, folder: Path
) -> Path:
    machine = machine_facts(plan.model)
    limits = {limit: nbytes for limit, nbytes in plan.limits}
    sections = [
        ("What was measured", method(plan, model_nbytes, version)),
        ("Machine", markdown_table(("", ""), machine.rows())),
        ("Versions", version_table(plan, samples)),
        ("Command", f"`{public_command(sys.argv)}`"),
    ]
    for limit, nbytes in limits.items():
        share = f"{nbytes / 2**20:.0f} MiB, {nbytes / model_nbytes:.2f} of the model"
        sections.append((f"Limit {limit} ({share})", markdown_table(HEADERS, rows_of(limit, samples, plan))))
    bounds = [row for limit in limits if (row := bound_row(limit, samples))]
    sections.append(("hetero against the disk", BOUND_TEXT + "\n\n" + markdown_table(BOUND_HEADERS, bounds)))
    sections.append(("Exactness", parity(samples) + "".join(f"\n\n**{complaint}**" for complaint in complaints)))
    raw = "\n".join(json.dumps(raw_sample(sample)) for sample in samples)
    sections.append(("Raw samples", details(f"{len(samples)} processes, one JSON object each", raw)))
    path = report_path("beyond_ram", machine, folder=folder)
    write_report(path, "A model larger than the memory limit", sections)
    return path


BOUND_TEXT = (
    "The disk's rate is measured just after each run of hetero: O_DIRECT reads of the same files into huge pages, "
    "the larger of both methods. The bound is streamed bytes / rate; `reached` is the bound over the measured time, "
    "the median of the runs."
)


def method(plan: Plan, model_nbytes: int, version: int) -> str:
    return (
        f"Greedy decode of a random Llama in bfloat16, {model_nbytes / 1e9:.2f} GB on disk: a prompt of 16 tokens, "
        f"{plan.num_tokens} tokens out, batch 1, {plan.num_threads} threads. {plan.num_repetitions} processes per "
        f"system and limit, the systems in turn. Each process starts inside a memory cgroup (v{version}) with that "
        "limit, interpreter, libraries and page cache included, after the machine's page cache was dropped.\n\n"
        "`s/token` is the median decode step of a process (the step that reads the prompt does not count), then the "
        "median over processes; `range` is over processes. `device GB/token` is the mean of what the process itself "
        "made the device read per decode step (`read_bytes` of /proc/self/io); the raw samples hold the whole disk's "
        "count (/proc/diskstats) beside it. Peak RSS is VmHWM and counts mapped file pages; the cgroup's peak counts "
        "page cache too, so it reaches the limit for every system that reads through it.\n\n"
        "accelerate may keep max(400 MiB, limit - 1100 MiB) of weights in RAM unless --accelerate-cpu says otherwise."
    )


def version_table(plan: Plan, samples: list[Sample]) -> str:
    names = versions(("rich",))
    rows = [["benchmark", ", ".join(f"{name} {version}" for name, version in names.items())]]
    for system, python in plan.interpreters.items():
        found = next((s.result["versions"] for s in samples if s.system == system and not s.failure), None)
        told = "not installed" if python is None else "none of its runs ended"
        rows.append([system, ", ".join(f"{k} {v}" for k, v in found.items()) if found else told])
    return markdown_table(("system", "versions"), rows)


def raw_sample(sample: Sample) -> dict[str, Any]:
    return {
        "system": sample.system,
        "limit": sample.limit,
        "limit_nbytes": sample.limit_nbytes,
        "repetition": sample.repetition,
        "failure": sample.failure,
        "wall_s": round(sample.wall_s, 2),
        "cgroup_peak_nbytes": sample.cgroup_peak_nbytes,
        "disk_bytes_per_s": sample.disk_bytes_per_s,
        **{key: value for key, value in sample.result.items() if key != "versions"},
    }


if __name__ == "__main__":
    main()
