"""`hetero doctor`: every probe answers on this machine, what is wrong comes with advice, nothing is left behind."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero.cli import doctor
from hetero.cli.doctor import Check, examine
from hetero.io.errors import UnsupportedError


@pytest.fixture(autouse=True)
def small_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_MEASURED_NBYTES", 4 << 20)
    monkeypatch.setattr(doctor, "_NUM_COPIES", 1)


def named(checks: list[Check], name: str) -> Check:
    (check,) = (check for check in checks if check.name == name)
    return check


@pytest.mark.usefixtures("no_leaks")
def test_every_probe_answers_and_leaves_nothing(tmp_path: Path) -> None:
    checks = examine(tmp_path)

    assert [check for check in checks if check.status == "fail"] == []
    wanted = {"hetero", "CPU", "RAM", "page-lock limit", "huge pages", "memory copy", "accelerator", "scratch folder"}
    assert wanted | {"io_uring", "O_DIRECT", "disk rate", "IPEX"} <= {check.name for check in checks}
    assert all(check.advice for check in checks if check.status == "warn")
    assert list(tmp_path.iterdir()) == []


def test_a_probe_that_breaks_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(folder: Path) -> Iterator[Check]:
        yield Check("first", "ok", "seen")
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(doctor, "_PROBES", (("disk", broken), ("versions", doctor._versions)))
    checks = examine(tmp_path)

    assert named(checks, "disk").status == "fail"
    assert "Input/output error" in named(checks, "disk").value
    assert named(checks, "hetero").status == "ok"


@pytest.mark.parametrize(
    ("kind", "status"),
    [("ext4", "ok"), ("tmpfs", "warn"), ("nfs4", "warn")],
)
def test_a_folder_in_ram_or_on_a_network_is_pointed_out(
    kind: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_file_system", lambda folder: kind)
    (check,) = doctor._folder(tmp_path)
    assert check.status == status
    assert ("--disk" in check.advice) == (status == "warn")


def test_the_file_system_is_that_of_the_innermost_mount() -> None:
    if not Path("/proc/mounts").exists():
        pytest.skip("no /proc here")
    assert doctor._file_system(Path("/proc/self")) == "proc"


def test_a_refused_io_uring_is_a_warning_not_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hetero.io.engine

    real = hetero.io.engine.Engine

    def refusing(*, backend: str = "auto") -> Any:
        if backend == "io_uring":
            raise UnsupportedError("io_uring: Operation not permitted")
        return real(backend="threads")

    monkeypatch.setattr(hetero.io.engine, "Engine", refusing)
    checks = list(doctor._disk(tmp_path))
    assert named(checks, "io_uring").status == "warn"
    assert "seccomp" in named(checks, "io_uring").advice
    assert "threads" in named(checks, "disk rate").value


def test_a_missing_compiled_part_comes_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hetero import native

    absent = native.NativePart("fast reads", "hetero.io._absent", "slow reads", (sys.platform,))
    monkeypatch.setattr(native, "PARTS", (absent,))
    check = next(iter(doctor._compiled_parts(tmp_path)))
    assert (check.status, check.value) == ("warn", "fast reads missing; instead: slow reads")
    assert "HETERO_REQUIRE_NATIVE=1" in check.advice


_FINDINGS = [Check("CPU", "ok", "fast"), Check("disk", "warn", "slow", "Buy another.")]


def test_findings_are_printed_with_their_advice(
    hetero_command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda folder: _FINDINGS)
    outcome = hetero_command("doctor")
    assert outcome.exit_code == 0
    assert [line.split() for line in outcome.stdout.splitlines()] == [
        ["ok", "CPU", "fast"],
        ["warn", "disk", "slow"],
        ["Buy", "another."],
    ]


def test_json_and_exit_code_tell_scripts(
    hetero_command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folders: list[Path] = []

    def failing(folder: Path) -> list[Check]:
        folders.append(folder)
        return [*_FINDINGS, Check("RAM", "fail", "none")]

    monkeypatch.setattr(doctor, "examine", failing)
    outcome = hetero_command("doctor", "--json", "--disk", str(tmp_path))
    assert outcome.exit_code == 1
    assert [check["status"] for check in json.loads(outcome.stdout)["checks"]] == ["ok", "warn", "fail"]
    assert folders == [tmp_path]


def test_a_folder_that_is_none_is_one_line(hetero_command: Callable[..., Any], tmp_path: Path) -> None:
    outcome = hetero_command("doctor", "--disk", str(tmp_path / "none"))
    assert outcome.exit_code == 2 and outcome.stdout == ""
    assert outcome.stderr == f"hetero: ConfigError: --disk {tmp_path / 'none'} is not a folder: create it first\n"
