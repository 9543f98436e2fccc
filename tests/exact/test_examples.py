"""The examples, and the one of the README, do what they say."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.tiny_models import write_checkpoint

ROOT = Path(__file__).parents[2]
README_TITLE = "## Any module, your own loop"
CNN = ("any_module.py", "--width", "8", "--batch", "4", "--steps", "2")
CNN_BUDGETS = ("--gpu-memory", "1MiB", "--cpu-memory", "2400KiB")


@dataclass(frozen=True, slots=True)
class Outcome:
    exit_code: int
    stdout: str
    stderr: str


def run(folder: Path, script: str, *arguments: str) -> Outcome:
    """Run a script in a process of its own, in `folder`, where it may leave a trace and nothing else."""
    before = {path.name for path in folder.iterdir()}
    finished = subprocess.run(
        [sys.executable, str(ROOT / "examples" / script), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert {path.name for path in folder.iterdir()} - before <= {"trace.json"}
    return Outcome(finished.returncode, finished.stdout, finished.stderr)


def num_read_nbytes(stdout: str) -> float:
    """What the printed statistics say was read from disk."""
    match = re.search(r"disk: ([\d.]+) (bytes|KiB|MiB) read", stdout)
    assert match is not None, stdout
    return float(match[1]) * {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20}[match[2]]


def test_any_module_trains_exactly(tmp_path: Path) -> None:
    outcome = run(tmp_path, *CNN, *CNN_BUDGETS, "--timeline", "trace.json")
    assert outcome.exit_code == 0, outcome.stderr
    assert "exact: 2 losses and 60 weights and buffers equal plain torch's, bit for bit" in outcome.stdout
    assert "before: warm-up" in outcome.stdout and "after: planned" in outcome.stdout
    assert num_read_nbytes(outcome.stdout) > 0
    names = {event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert {"forward with autograd", "backward"} <= names


def test_wrap_llm_trains_and_speaks_exactly(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", "llama")
    outcome = run(
        tmp_path, "wrap_llm.py", "--model", str(model), "--steps", "2", "--max-tokens", "3", "--cpu-memory", "3MiB"
    )
    assert outcome.exit_code == 0, outcome.stderr
    assert "exact: 2 losses, 30 weights and 3 tokens equal plain torch's, bit for bit" in outcome.stdout
    assert num_read_nbytes(outcome.stdout) > 0


def test_one_wrong_bit_is_told() -> None:
    check_equal = runpy.run_path(str(ROOT / "examples" / "_common.py"))["check_equal"]
    plain = {"loss": torch.tensor(1.0), "weight": torch.ones(3)}
    check_equal("all", plain, {name: tensor.clone() for name, tensor in plain.items()})
    wrapped = plain | {"weight": torch.tensor([1.0, 1.0, 1.0 + 2**-23])}
    with pytest.raises(SystemExit, match="DIFFERENT from plain torch: weight"):
        check_equal("all", plain, wrapped)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*CNN, "--steps", "0"), "--steps"),
        ((*CNN, "--gpu-memory", "1G"), "1GiB"),
        ((*CNN, "--gpu-memory", "4KiB"), "gpu_memory="),
        (("wrap_llm.py", "--model", "missing"), "missing"),
    ],
    ids=["steps", "unit", "too-small", "no-model"],
)
def test_a_wrong_option_is_one_line(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    outcome = run(tmp_path, *arguments)
    assert outcome.exit_code == 2
    assert outcome.stdout == ""
    (line,) = outcome.stderr.splitlines()
    assert line.startswith(arguments[0]) and words in line


def test_the_readme_tells_the_truth(tmp_path: Path) -> None:
    section = (ROOT / "README.md").read_text().partition(README_TITLE)[2].partition("\n## ")[0]
    code, printed = section.split("```python\n")[1].split("```")[:2]
    script = tmp_path / "readme.py"
    script.write_text(code)
    outcome = run(tmp_path, str(script))
    assert outcome.exit_code == 0, outcome.stderr
    promised = [line for line in printed.splitlines() if line.startswith("    ")]
    assert outcome.stdout.split("\n")[0].split() == promised[0].split()  # the losses; figures of speed may differ
    assert re.sub(r"[\d.]+", "0", outcome.stdout).split() == re.sub(r"[\d.]+", "0", "\n".join(promised)).split()
    assert num_read_nbytes(outcome.stdout) > 64 << 20


@pytest.mark.slow
@pytest.mark.parametrize("script", ["any_module.py", "wrap_llm.py"])
def test_defaults_stream_and_are_exact(tmp_path: Path, script: str) -> None:
    outcome = run(tmp_path, script)
    assert outcome.exit_code == 0, outcome.stderr
    assert "equal plain torch's, bit for bit" in outcome.stdout
    assert "peak" in outcome.stdout and "GiB read" in outcome.stdout
