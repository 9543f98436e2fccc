"""A run that needs no model, and the command line called in this process."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hetero
from hetero.cli import main
from hetero.report.schema import PlanDict, StatsDict

STATS: StatsDict = {
    "prompt_tokens": 12,
    "prompt_tokens_per_s": 35.04,
    "generation_tokens": 3,
    "generation_tokens_per_s": 8.25,
    "num_passes": 3,
    "disk_nbytes_per_token": 4096.0,
    "pass_s": 0.02,
    "bound_s": 0.01,
    "bottleneck": "disk",
    "links": {
        "disk": {"nbytes": 1 << 20, "bytes_per_s": 3.1e9, "limit_bytes_per_s": 3.9e9},
        "gpu link": {"nbytes": 1 << 20, "bytes_per_s": 1.5e9, "limit_bytes_per_s": None},
    },
    "tiers": {
        "gpu": {"used_nbytes": 1, "peak_nbytes": 23 << 20, "limit_nbytes": 24 << 20, "holders": {}},
        "cpu": {"used_nbytes": 1, "peak_nbytes": 47 << 20, "limit_nbytes": 48 << 20, "holders": {}},
    },
    "baseline_nbytes": 400 << 20,
    "arena_nbytes": 72 << 20,
    "huge_page_nbytes": 70 << 20,
    "executor": {},
    "io": {},
}

PLAN: PlanDict = {
    "model": "tiny.gguf",
    "dtype": "bfloat16",
    "device": "emulated",
    "total_nbytes": 92 << 20,
    "context": 2048,
    "num_chunks": 31,
    "chunk_nbytes": 3 << 20,
    "tiers": [
        {
            "tier": "gpu",
            "limit_nbytes": 24 << 20,
            "resident_nbytes": 16 << 20,
            "ring_nbytes": 6 << 20,
            "other_nbytes": 2 << 20,
            "streamed_nbytes": None,
            "link_bytes_per_s": None,
        },
        {
            "tier": "disk",
            "limit_nbytes": None,
            "resident_nbytes": None,
            "ring_nbytes": None,
            "other_nbytes": None,
            "streamed_nbytes": 40 << 20,
            "link_bytes_per_s": 3.9e9,
        },
    ],
    "phases": [
        {
            "phase": "decode",
            "num_tokens": 1,
            "disk_nbytes": 40 << 20,
            "gpu_link_nbytes": 76 << 20,
            "time_s": 0.0125,
            "bound_s": 0.0107,
            "tokens_per_s": 80.0,
            "bottleneck": "disk",
        }
    ],
    "notes": ["18 MiB more of cpu memory would keep everything in RAM"],
}


@dataclass
class FakeRun:
    """Speaks `texts` and records how it was used; raises `failure` after the last text when there is one."""

    texts: list[str] = field(default_factory=lambda: ["Blue", " light", "."])
    failure: BaseException | None = None
    finish_reason: str = "stop"
    load_arguments: dict[str, Any] = field(default_factory=dict)
    stream_arguments: dict[str, Any] = field(default_factory=dict)
    traced: Path | None = None
    num_closed: int = 0
    is_recording: bool = False

    def __enter__(self) -> FakeRun:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.num_closed += 1

    @property
    def plan(self) -> SimpleNamespace:
        return SimpleNamespace(to_dict=lambda: PLAN)

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(to_dict=lambda: STATS)

    def stream(self, prompt: str, **arguments: Any) -> Iterator[SimpleNamespace]:
        self.stream_arguments = {"prompt": prompt, **arguments}
        for index, text in enumerate(self.texts):
            last = index == len(self.texts) - 1 and self.failure is None
            yield SimpleNamespace(text=text, token=100 + index, finish_reason=self.finish_reason if last else None)
        if self.failure is not None:
            raise self.failure

    def record_timeline(self) -> None:
        self.is_recording = True

    def trace(self, path: Path) -> None:
        assert self.is_recording, "nothing was recorded"
        self.traced = path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    """A fake run that `hetero.load` gives out; its first load reports 3 MiB of progress."""
    fake = FakeRun()

    def load(model: str, *, progress: Callable[[Any], None], **arguments: Any) -> FakeRun:
        fake.load_arguments = {"model": model, **arguments}
        for done in (1 << 20, 3 << 20):
            progress(SimpleNamespace(phase="load", done_nbytes=done, total_nbytes=3 << 20, message=""))
        return fake

    # Not setattr: that would look the real one up first, and import torch.
    monkeypatch.setitem(vars(hetero), "load", load)
    return fake


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a fake `hetero.plan` answers; the arguments of its call are put under "arguments"."""
    answer: dict[str, Any] = dict(PLAN)

    def fake(model: str, **arguments: Any) -> SimpleNamespace:
        answer["arguments"] = {"model": model, **arguments}
        return SimpleNamespace(to_dict=lambda: PLAN)

    monkeypatch.setitem(vars(hetero), "plan", fake)
    return answer


@dataclass(frozen=True, slots=True)
class Outcome:
    exit_code: int
    stdout: str
    stderr: str


@pytest.fixture
def hetero_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Outcome]]:
    """Call the `hetero` command in this process, and take its log handler away afterwards."""
    logger = logging.getLogger("hetero")
    handlers, level = list(logger.handlers), logger.level

    def command(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["hetero", *arguments])
        with pytest.raises(SystemExit) as exit_info:
            main()
        captured = capsys.readouterr()
        code = exit_info.value.code
        assert code is None or isinstance(code, int)
        return Outcome(code or 0, captured.out, captured.err)

    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # so that --offline is undone after the test
    yield command
    logger.handlers[:] = handlers
    logger.setLevel(level)
