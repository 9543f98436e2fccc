"""`hetero generate`: the answer alone on stdout, everything else on stderr, and a clean end whatever happens."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hetero
from hetero.cli.options import as_flags
from hetero.io.errors import CheckpointError, ConfigError, OutOfMemoryError


def test_stdout_is_the_answer_and_stderr_the_rates(hetero_command: Callable[..., Any], run: Any) -> None:
    outcome = hetero_command("generate", "tiny.gguf", "-p", "Why?")

    assert outcome.exit_code == 0
    assert outcome.stdout == "Blue light.\n"
    assert "load: 3.0 MiB in" in outcome.stderr
    assert "12 prompt tokens at 35.0/s; 3 generation tokens at 8.2/s" in outcome.stderr
    assert "disk 3.1 GB/s of 3.9 GB/s; gpu link 1.5 GB/s;" in outcome.stderr
    assert "a pass took 20.0 ms, 10.0 ms of disk at least; 70.0 MiB of 72.0 MiB on huge pages;" in outcome.stderr
    assert "peak gpu 23.0 MiB of 24.0 MiB, cpu 47.0 MiB of 48.0 MiB" in outcome.stderr
    assert run.num_closed == 1


def test_json_is_one_object_and_nothing_else(hetero_command: Callable[..., Any], run: Any) -> None:
    outcome = hetero_command("generate", "tiny.gguf", "-p", "Why?", "--json")

    answer = json.loads(outcome.stdout)
    assert answer["text"] == "Blue light."
    assert answer["tokens"] == [100, 101, 102]
    assert answer["finish_reason"] == "stop"
    assert answer["stats"]["tiers"]["gpu"]["peak_nbytes"] == 23 << 20
    assert answer["plan"]["phases"][0]["bottleneck"] == "disk"


def test_every_option_reaches_the_run(hetero_command: Callable[..., Any], run: Any, tmp_path: Path) -> None:
    memory = ("--gpu-memory", "24MiB", "--cpu-memory", "50%", "--disk", str(tmp_path), "--device", "emulated")
    model = ("--link", "12GB/s", "--dtype", "bfloat16", "-c", "512", "--trust-remote-code")
    text = ("-n", "7", "--temp", "0.5", "--seed", "3", "--raw", "--timeline", "out.json")

    outcome = hetero_command("generate", "m", "-p", "Hi", *memory, *model, *text)

    assert outcome.exit_code == 0
    assert run.load_arguments == {
        "model": "m",
        "gpu_memory": "24MiB",
        "cpu_memory": "50%",
        "disk": tmp_path,
        "device": "emulated",
        "link": "12GB/s",
        "dtype": "bfloat16",
        "context": 512,
        "trust_remote_code": True,
    }
    assert run.stream_arguments == {"prompt": "Hi", "max_tokens": 7, "temperature": 0.5, "seed": 3, "chat": False}
    assert run.traced == Path("out.json")


def test_flags_have_environment_twins_and_win_over_them(
    hetero_command: Callable[..., Any], run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETERO_CPU_MEMORY", "2GiB")
    monkeypatch.setenv("HETERO_GPU_MEMORY", "1GiB")

    hetero_command("generate", "m", "-p", "Hi", "--gpu-memory", "3GiB")

    assert (run.load_arguments["cpu_memory"], run.load_arguments["gpu_memory"]) == ("2GiB", "3GiB")


def test_a_dash_reads_the_prompt_from_stdin(
    hetero_command: Callable[..., Any], run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    hetero_command("generate", "m", "-p", "-")
    assert run.stream_arguments["prompt"] == "from a pipe"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(("generate", "m"), "--prompt", id="no prompt"),
        pytest.param(("generate", "m", "-p", " "), "--prompt is empty", id="empty prompt"),
        pytest.param(("generate", "-p", "Hi"), "model", id="no model"),
        pytest.param(("generate", "m", "-p", "Hi", "--device", "tpu"), "tpu", id="unknown device"),
        pytest.param(("generate", "m", "-p", "Hi", "-n", "0"), "max-tokens", id="no tokens"),
        pytest.param(("generate", "m", "-p", "Hi", "--gpu-mem", "1"), "--gpu-mem", id="unknown option"),
        pytest.param(("fly",), "fly", id="unknown command"),
    ],
)
def test_wrong_usage_is_exit_2_before_anything_loads(
    hetero_command: Callable[..., Any], run: Any, arguments: tuple[str, ...], said: str
) -> None:
    outcome = hetero_command(*arguments)
    assert outcome.exit_code == 2
    assert outcome.stdout == ""
    assert said in outcome.stderr
    assert run.load_arguments == {}


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        pytest.param(ConfigError("cpu_memory='6G' is ambiguous:\nwrite 6GiB"), 2, id="option value"),
        pytest.param(CheckpointError("m.gguf", "ends inside tensor 3"), 1, id="bad file"),
        pytest.param(
            OutOfMemoryError("gpu: 4 bytes wanted", tier="gpu", requested_nbytes=4, free_nbytes=1), 1, id="budget"
        ),
        pytest.param(FileNotFoundError(2, "No such file or directory", "m.gguf"), 1, id="missing file"),
    ],
)
def test_a_user_error_is_one_line(
    hetero_command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, error: Exception, exit_code: int
) -> None:
    def load(model: str, **arguments: object) -> None:
        raise error

    monkeypatch.setitem(vars(hetero), "load", load)
    outcome = hetero_command("generate", "m.gguf", "-p", "Hi")

    assert outcome.exit_code == exit_code
    (line,) = outcome.stderr.splitlines()
    spelled = str(error).replace("cpu_memory='6G'", "--cpu-memory 6G")
    assert line == f"hetero: {type(error).__name__}: {' '.join(spelled.split())}"


@pytest.mark.parametrize(
    ("message", "spelled"),
    [
        ('device="emulated" needs a size: set gpu_memory', "--device emulated needs a size: set --gpu-memory"),
        ("the smallest is gpu_memory=4096, cpu_memory=8192", "the smallest is --gpu-memory 4096, --cpu-memory 8192"),
        ("disk='' is not a folder", "--disk '' is not a folder"),
        ("trust_remote_code=True would run it", "--trust-remote-code would run it"),
        ("gpu: 4 bytes wanted on device cpu", "gpu: 4 bytes wanted on device cpu"),
    ],
)
def test_options_are_spelled_as_they_are_typed(message: str, spelled: str) -> None:
    assert as_flags(message) == spelled


def test_verbose_adds_the_traceback(hetero_command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def load(model: str, **arguments: object) -> None:
        raise ConfigError("no")

    monkeypatch.setitem(vars(hetero), "load", load)
    outcome = hetero_command("generate", "m", "-p", "Hi", "-v")
    assert "Traceback" in outcome.stderr


def test_a_bug_keeps_its_traceback(hetero_command: Callable[..., Any], run: Any) -> None:
    run.failure = ZeroDivisionError("ours")
    with pytest.raises(ZeroDivisionError):
        hetero_command("generate", "m", "-p", "Hi")
    assert run.num_closed == 1


@pytest.mark.parametrize(
    ("failure", "exit_code"),
    [pytest.param(KeyboardInterrupt(), 130, id="ctrl-c"), pytest.param(CheckpointError("m", "gone"), 1, id="error")],
)
def test_an_end_in_the_middle_closes_the_run_and_keeps_the_text(
    hetero_command: Callable[..., Any], run: Any, failure: BaseException, exit_code: int
) -> None:
    run.failure = failure
    outcome = hetero_command("generate", "m", "-p", "Hi")
    assert outcome.exit_code == exit_code
    assert outcome.stdout == "Blue light.\n"
    assert "Traceback" not in outcome.stderr
    assert ("3 generation tokens" in outcome.stderr) == (exit_code == 130)
    assert run.num_closed == 1


_INTERRUPTED = """
import sys, time
from types import SimpleNamespace
import hetero
from hetero.cli import main
from tests.cli.conftest import STATS

class Run:
    def __enter__(self): return self
    def stats(self): return SimpleNamespace(to_dict=lambda: STATS)
    def __exit__(self, *exc_info): print("closed", file=sys.stderr)
    def stream(self, prompt, **arguments):
        yield SimpleNamespace(text="first", token=1, finish_reason=None)
        time.sleep(60)

hetero.load = lambda model, **arguments: Run()
sys.argv = ["hetero", "generate", "m", "-p", "Hi"]
main()
"""


def test_a_real_interrupt_stops_a_running_command() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _INTERRUPTED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(5) == "first"
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert stdout == "\n"
    assert stderr.splitlines()[-1] == "closed"
    assert "3 generation tokens" in stderr


def test_threads_spin_briefly_unless_the_user_says_how(
    hetero_command: Callable[..., Any], run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for policy in ("passive", None):
        monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
        if policy is not None:
            monkeypatch.setenv("OMP_WAIT_POLICY", policy)
        hetero_command("generate", "m", "-p", "Hi")
        assert ("GOMP_SPINCOUNT" in os.environ) is (policy is None)
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    hetero_command("generate", "m", "-p", "Hi")
    assert os.environ["GOMP_SPINCOUNT"] == "7"


def test_a_full_context_is_told(hetero_command: Callable[..., Any], run: Any) -> None:
    run.finish_reason = "length"
    outcome = hetero_command("generate", "m", "-p", "Hi", "-n", "9", "-c", "64")
    assert "stopped: the context of 64 tokens is full; raise --context\n" in outcome.stderr
    outcome = hetero_command("generate", "m", "-p", "Hi", "-n", "3", "-c", "64")
    assert "stopped" not in outcome.stderr
