"""Interleaved rounds: every contender once a round, so that a machine that drifts drifts for all of them."""

from __future__ import annotations

import resource
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


class UnavailableError(RuntimeError):
    """A contender cannot run here; the message says why."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement. `cpu_s` is user and system time of the process that did it, or of its threads that did."""

    seconds: float
    cpu_s: float
    nbytes: int
    peak_nbytes: int = 0
    """Most memory that the process had resident, beyond what it had before. 0 where it was not measured."""

    @property
    def bytes_per_s(self) -> float:
        return self.nbytes / self.seconds


@dataclass(slots=True)
class Contender:
    """Something to measure, and its samples, one a round. `problem` says why it has none, or no more."""

    name: str
    run: Callable[[], Sample]
    samples: list[Sample] = field(default_factory=list)
    problem: str = ""

    @property
    def bytes_per_s(self) -> float:
        return statistics.median(sample.bytes_per_s for sample in self.samples)

    @property
    def cpu_s_per_gb(self) -> float:
        return statistics.median(sample.cpu_s / sample.nbytes * 1e9 for sample in self.samples)

    def ratio_to(self, other: Contender) -> float:
        """The median of the rounds' own ratios: what one round does to both cancels out."""
        pairs = zip(self.samples, other.samples, strict=True)
        return statistics.median(mine.bytes_per_s / theirs.bytes_per_s for mine, theirs in pairs)

    def raw_line(self) -> str:
        rates = " ".join(f"{sample.bytes_per_s / 1e9:.3f}" for sample in self.samples)
        cpu = " ".join(f"{sample.cpu_s / sample.nbytes * 1e9:.4f}" for sample in self.samples)
        return f"{self.name}: GB/s {rates}; CPU s/GB {cpu}"


def run_rounds(contenders: Sequence[Contender], *, num_rounds: int, num_warmups: int = 1) -> None:
    """Measure in `num_warmups` rounds that are thrown away and `num_rounds` that are kept.

    Every other round goes backwards, so that no contender always follows the same one. A contender that raises
    UnavailableError is out, with its samples.
    """
    for number in range(-num_warmups, num_rounds):
        print(f"round {number + 1} of {num_rounds}" if number >= 0 else "warm-up", flush=True)
        for contender in contenders if number % 2 == 0 else reversed(contenders):
            if contender.problem:
                continue
            try:
                sample = contender.run()
            except UnavailableError as error:
                contender.problem = str(error)
                contender.samples.clear()
                print(f"  {contender.name}: {error}", flush=True)
                continue
            print(f"  {contender.name}: {sample.bytes_per_s / 1e9:.2f} GB/s", flush=True)
            if number >= 0:
                contender.samples.append(sample)


def own_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def verdict(ratio: float, floor: float) -> str:
    return "met" if ratio >= floor else "missed"
