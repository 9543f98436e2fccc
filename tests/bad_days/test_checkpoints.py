"""The user's file changes under us: the answer is the old one or an error that says what happened, never garbage."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hetero.setup
from hetero.io.errors import CheckpointError, HeteroError, IOEngineError
from tests.bad_days.rig import DEVICES, load, logits_of, smallest

pytestmark = pytest.mark.usefixtures("no_leaks", "no_memory_left")

FILE = "model.safetensors"


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 100_000)


def replace(file: Path) -> None:
    """What an updated download does: another file is renamed over it."""
    other = file.with_suffix(".new")
    other.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\0")
    os.replace(other, file)


def overwrite(file: Path) -> None:
    with open(file, "r+b") as opened:
        opened.seek(-50_000, os.SEEK_END)
        opened.write(b"\xff" * 40_000)


def remove(file: Path) -> None:
    file.unlink()


def grow(file: Path) -> None:
    os.truncate(file, file.stat().st_size + 8192)


@pytest.mark.parametrize("change", [truncate, replace, overwrite, remove, grow], ids=lambda f: f.__name__)
def test_a_change_between_header_and_load_is_refused(
    own_checkpoint: Path, change: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    smallest(own_checkpoint, "cpu")
    open_source = vars(hetero.setup)["open_source"]

    def open_then_change(*args: Any, **options: Any) -> Any:
        source = open_source(*args, **options)
        change(own_checkpoint / FILE)
        return source

    monkeypatch.setattr(hetero.setup, "open_source", open_then_change)
    with pytest.raises((CheckpointError, IOEngineError), match=FILE):
        load(own_checkpoint)


@pytest.mark.parametrize("change", [truncate, replace, overwrite, remove], ids=lambda f: f.__name__)
def test_a_change_between_plan_and_load_gives_the_new_file_or_an_error(
    own_checkpoint: Path, change: Callable[[Path], None]
) -> None:
    # A plan holds nothing open: loading looks at what is there now.
    hetero.plan(own_checkpoint, device="cpu", **smallest(own_checkpoint, "cpu"), context=64, chunk_nbytes=48 << 10)
    change(own_checkpoint / FILE)
    if change in (truncate, remove):
        with pytest.raises(HeteroError):
            load(own_checkpoint)
    else:
        with load(own_checkpoint) as run:
            assert logits_of(run.model).shape == (1, 13, 320)


@pytest.mark.parametrize("change", [replace, remove], ids=lambda f: f.__name__)
@pytest.mark.parametrize("device", DEVICES)
def test_a_file_replaced_after_load_does_not_matter(
    own_checkpoint: Path, reference: torch.Tensor, device: str, change: Callable[[Path], None]
) -> None:
    with load(own_checkpoint, device) as run:
        change(own_checkpoint / FILE)
        for _ in range(3):
            assert torch.equal(logits_of(run.model), reference)
        assert run.executor.stats.num_reads > 20, "nothing was read after the change"


@pytest.mark.parametrize("change", [truncate, overwrite, grow], ids=lambda f: f.__name__)
@pytest.mark.parametrize("device", DEVICES)
def test_a_file_changed_in_place_after_load_ends_the_next_pass(
    own_checkpoint: Path, reference: torch.Tensor, device: str, change: Callable[[Path], None]
) -> None:
    with load(own_checkpoint, device) as run:
        assert torch.equal(logits_of(run.model), reference)
        change(own_checkpoint / FILE)
        for _ in range(3):
            with pytest.raises(CheckpointError, match=r"since it was read.*; load the model again") as caught:
                logits_of(run.model)
            assert caught.value.path == own_checkpoint / FILE
            del caught


@pytest.mark.parametrize("change", [truncate, overwrite], ids=lambda f: f.__name__)
@pytest.mark.parametrize("device", DEVICES)
def test_a_file_changed_in_the_middle_of_a_pass_gives_no_answer(
    own_checkpoint: Path, device: str, change: Callable[[Path], None]
) -> None:
    with load(own_checkpoint, device) as run:
        handle = run.model.model.layers[0].register_forward_hook(lambda *_: change(own_checkpoint / FILE))
        with pytest.raises((CheckpointError, IOEngineError), match=FILE):
            logits_of(run.model)
        handle.remove()


def test_generation_over_a_changed_file_stops_with_the_error(own_checkpoint: Path) -> None:
    with load(own_checkpoint) as run:
        segments = run.stream("w5 w6 w7", max_tokens=8)
        next(segments)
        truncate(own_checkpoint / FILE)
        with pytest.raises(CheckpointError, match="was truncated since it was read"):
            list(segments)


def test_a_folder_moved_away_after_load_does_not_matter(own_checkpoint: Path, reference: torch.Tensor) -> None:
    with load(own_checkpoint) as run:
        shutil.move(own_checkpoint, own_checkpoint.with_name("elsewhere"))
        assert torch.equal(logits_of(run.model), reference)
