"""Tiny checkpoints and a disk to fail."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hetero.setup
from hetero.io.arena import _Mapping
from tests.bad_days.rig import Disk, reference_logits
from tests.tiny_models import write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer. Not to be changed."""
    folder = write_checkpoint(tmp_path_factory.mktemp("bad-days") / "llama", "llama")
    _write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> torch.Tensor:
    """What transformers answers to `IDS`."""
    return reference_logits(checkpoint)


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Measure the machine once, collect no garbage at each load, and compute on one thread: models are tiny here."""
    threads = torch.get_num_threads()
    measure: Callable[..., Any] = vars(hetero.setup)["measure_compute"]
    rates: dict[Any, Any] = {}

    def measure_once(dtype: torch.dtype, formats: set[str], device: Any) -> Any:
        key = dtype, frozenset(formats), device.name
        if key not in rates:
            rates[key] = measure(dtype, formats, device)
        return rates[key]

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what torch and transformers allocated is no leak, and slow to walk over
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hetero.setup, "measure_compute", measure_once)
        patch.setattr(hetero.setup, "trim_heap", lambda: None)
        yield
    gc.unfreeze()
    torch.set_num_threads(threads)


@pytest.fixture
def own_checkpoint(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy to be truncated, replaced, modified."""
    return Path(shutil.copytree(checkpoint, tmp_path / "own"))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(hetero.setup, "Engine", disk.make_engine)
    return disk


@pytest.fixture
def no_memory_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail when the test leaves an arena mapped."""
    made: weakref.WeakSet[_Mapping] = weakref.WeakSet()
    original = _Mapping.__init__

    def init(self: _Mapping, *args: Any) -> None:
        original(self, *args)
        made.add(self)

    monkeypatch.setattr(_Mapping, "__init__", init)
    yield
    gc.collect()
    assert not made, f"arenas left mapped at {[each.address for each in made]}"


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, 320)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
