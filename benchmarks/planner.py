"""The planner's predictions beside what the executor then takes, over models, budgets and links of known rates.

    python benchmarks/planner.py [--rounds 3] [--no-report]

The settings are those of tests/memory/test_prediction.py: a disk throttled to a rate, the emulated GPU's link, compute
that sleeps. So the figures do not depend on this machine's disk, only on how late its threads wake up.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from _report import machine_facts, markdown_table, public_command, report_path, versions, write_report

if TYPE_CHECKING:
    from tests.memory.prediction_rig import Outcome, Setting

ROOT = Path(__file__).resolve().parents[1]
TOLERANCE = 0.10
HEADERS = (
    "setting",
    "budgets gpu + cpu",
    "disk / link MB/s",
    "bottleneck",
    "bound ms",
    "planned ms",
    "predicted ms",
    "measured ms",
    "ratio",
    "disk MB",
    "link MB",
)
EXPLANATION = """\
A steady pass of a model of 12 to 14 MB, medians of {num_rounds} rounds. *bound*: the busiest of disk, gpu link and
compute, at full rate. *planned*: what `make_plan` said before anything ran. *predicted*: the same plan simulated with
what each moment was seen to take once its chunks were due, which adds the late wake-ups of threads on this machine and
nothing else. *measured*: the executor, with real reads, copies and leases. *ratio*: measured / predicted; the goal is
within {tolerance:.0%}. Bytes are per pass, as planned; the counted bytes of every run agreed with them."""


def run(settings: Mapping[str, Setting], num_rounds: int) -> dict[str, list[Outcome]]:
    """Interleaved, so that a machine that drifts drifts for all of them."""
    from tests.memory.prediction_rig import NUM_MEASURED, run_setting

    outcomes: dict[str, list[Outcome]] = {name: [] for name in settings}
    for _ in range(num_rounds):
        for name, setting in settings.items():
            with tempfile.TemporaryDirectory() as folder:
                outcome = run_setting(setting, Path(folder))
            prediction = outcome.plan.prediction
            counted = (outcome.disk_nbytes, outcome.gpu_link_nbytes)
            for nbytes, planned in zip(counted, (prediction.disk_nbytes, prediction.gpu_link_nbytes), strict=True):
                assert abs(nbytes - NUM_MEASURED * planned) <= outcome.slack_nbytes, f"{name}: {nbytes=} {planned=}"
            outcomes[name].append(outcome)
            print(f"{name:14} predicted {outcome.predicted_s * 1e3:6.1f} ms, measured {outcome.measured_s * 1e3:6.1f}")
    return outcomes


def row(name: str, setting: Setting, outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    prediction = outcomes[0].plan.prediction

    def ms(values: list[float]) -> str:
        return f"{statistics.median(values) * 1e3:.1f}"

    gpu = "no gpu" if setting.gpu_share is None else f"{setting.gpu_share:.0%}"
    link = "" if setting.link is None else f" / {setting.link:g}"
    return (
        name,
        f"{gpu} + {setting.cpu_share:.0%}",
        f"{setting.disk:g}{link}",
        prediction.bottleneck,
        f"{prediction.bound_s * 1e3:.1f}",
        ms([outcome.planned_s for outcome in outcomes]),
        ms([outcome.predicted_s for outcome in outcomes]),
        ms([outcome.measured_s for outcome in outcomes]),
        f"{median_ratio(outcomes):.3f}",
        f"{prediction.disk_nbytes / 1e6:.2f}",
        f"{prediction.gpu_link_nbytes / 1e6:.2f}",
    )


def median_ratio(outcomes: Sequence[Outcome]) -> float:
    return statistics.median(outcome.ratio for outcome in outcomes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="times every setting is run (default: 3)")
    parser.add_argument("--no-report", action="store_true", help="print only")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))  # a script's path has its own folder only
    from tests.memory.prediction_rig import SETTINGS

    outcomes = run(SETTINGS, options.rounds)
    table = markdown_table(HEADERS, [row(name, setting, outcomes[name]) for name, setting in SETTINGS.items()])
    ratios = {name: median_ratio(of_setting) for name, of_setting in outcomes.items()}
    worst = max(ratios, key=lambda name: abs(ratios[name] - 1))
    num_within = sum(abs(ratio - 1) <= TOLERANCE for ratio in ratios.values())
    result = f"{num_within} of {len(ratios)} settings within {TOLERANCE:.0%}; furthest: {worst}, {ratios[worst]:.3f}."
    print(f"\n{table}\n\n{result}")
    if not options.no_report:
        machine = machine_facts(Path(tempfile.gettempdir()))
        facts = [*machine.rows(), *versions(("hetero", "torch", "numpy")).items()]
        path = report_path("planner", machine)
        explanation = EXPLANATION.format(num_rounds=options.rounds, tolerance=TOLERANCE)
        write_report(
            path,
            "Predicted and measured pass times",
            [
                ("Result", f"{result}\n\n{table}"),
                ("Setting", f"{explanation}\n\nBudgets: the smallest that work, and that share of the model more."),
                ("Machine and versions", markdown_table(["", ""], facts)),
                ("Command", f"`{public_command(sys.argv)}`"),
            ],
        )
        print(f"written: {path}")
    if num_within < len(ratios):
        sys.exit(1)


if __name__ == "__main__":
    main()
