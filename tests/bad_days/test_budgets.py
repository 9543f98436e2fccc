"""Budgets at their limits: the smallest is named, works exactly, and one page less is refused; nonsense is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hetero
from hetero.io.errors import ConfigError, HeteroError
from hetero.planning import TooSmallError
from tests.bad_days.rig import DEVICES, IDS, logits_of, reference_logits
from tests.tiny_models import write_checkpoint

pytestmark = pytest.mark.usefixtures("no_leaks", "no_memory_left")

PAGE_NBYTES = 4096
FAMILIES: dict[str, dict[str, Any]] = {
    "llama-tied": {"family": "llama", "tied": True},
    "qwen3-bf16": {"family": "qwen3", "dtype": torch.bfloat16},
    "gemma2": {"family": "gemma2"},
    "gpt2": {"family": "gpt2"},
    "mixtral": {"family": "mixtral"},
}
WISHES: dict[str, dict[str, int]] = {
    "short": {"context": 16, "chunk_nbytes": 32 << 10},
    "long": {"context": 256, "chunk_nbytes": 256 << 10},
    "pieces": {"context": 200, "prefill_tokens": 13, "chunk_nbytes": 4096},
    "free": {"context": 100},
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    folder = write_checkpoint(tmp_path_factory.mktemp(request.param), **FAMILIES[request.param])
    return folder, reference_logits(folder)


def needs_of(folder: Path, **arguments: Any) -> tuple[dict[str, int], str]:
    with pytest.raises(TooSmallError) as caught:
        hetero.load(folder, **arguments)
    return {f"{tier}_memory": nbytes for tier, nbytes in caught.value.needs.items()}, str(caught.value)


@pytest.mark.parametrize("wishes", WISHES)
@pytest.mark.parametrize("device", DEVICES)
def test_the_smallest_budgets_are_named_work_and_are_the_smallest(
    family: tuple[Path, torch.Tensor], device: str, wishes: str
) -> None:
    folder, reference = family
    arguments: dict[str, Any] = {"device": device, **WISHES[wishes]}
    tiny = {"cpu_memory": 1} | ({"gpu_memory": 1} if device == "emulated" else {})
    needs, message = needs_of(folder, **arguments, **tiny)
    for name, nbytes in needs.items():
        assert f"{name} is 1 bytes" in message and f"{name}={nbytes}" in message
    with hetero.load(folder, **arguments, **needs) as run:
        _use_eager_experts(run.model)
        for _ in range(2):
            assert torch.equal(logits_of(run.model), reference)
        for tier in run.ledger.tiers():
            assert run.ledger.peak(tier) <= needs[f"{tier}_memory"]
    for name in needs:
        less = needs | {name: needs[name] - PAGE_NBYTES}
        again, message = needs_of(folder, **arguments, **less)
        assert again == needs, "two refusals name different budgets"
        assert message.count("it needs") == 1


def _use_eager_experts(model: Any) -> None:
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")


def test_a_longer_context_and_longer_pieces_never_need_less(checkpoint: Path) -> None:
    previous = 0
    for context in (1, 2, 16, 64, 200, 256):
        needs, _ = needs_of(checkpoint, device="cpu", cpu_memory=1, context=context, chunk_nbytes=32 << 10)
        assert needs["cpu_memory"] >= previous
        previous = needs["cpu_memory"]


NONSENSE: dict[str, tuple[dict[str, Any], str]] = {
    "one byte": ({"cpu_memory": "1B"}, r"cpu_memory='1B'"),
    "one": ({"cpu_memory": 1}, r"cpu_memory is 1 bytes .*smallest that works is cpu_memory=\d+"),
    "zero": ({"cpu_memory": 0}, r"cpu_memory=0 comes to 0 bytes"),
    "zero text": ({"cpu_memory": "0GiB"}, r"cpu_memory='0GiB' comes to 0 bytes"),
    "negative": ({"cpu_memory": -5}, r"cpu_memory=-5"),
    "negative text": ({"cpu_memory": "-5GiB"}, r"cpu_memory='-5GiB'"),
    "nan": ({"cpu_memory": float("nan")}, r"cpu_memory=nan is a float"),
    "bare unit": ({"cpu_memory": "6G"}, r"6GiB"),
    "all and more": ({"cpu_memory": "120%"}, r"more than 100%"),
    "more than the machine": ({"cpu_memory": "900TiB"}, r"only .* can be had"),
    "more than exists": ({"cpu_memory": 1 << 80}, r"cpu_memory=\d+ is more than"),
    "gpu without one": ({"gpu_memory": "1GiB"}, r"no gpu tier"),
    "gpu nonsense without one": ({"gpu_memory": "lots"}, r"gpu_memory='lots'"),
    "emulated auto": ({"device": "emulated"}, r"set gpu_memory"),
    "emulated zero": ({"device": "emulated", "gpu_memory": 0}, r"gpu_memory=0"),
    "emulated share": ({"device": "emulated", "gpu_memory": "50%"}, r"gpu_memory='50%'"),
    "emulated one": ({"device": "emulated", "gpu_memory": 1}, r"gpu_memory is 1 bytes"),
    "no context": ({"context": 0}, r"context must be at least 1"),
    "negative context": ({"context": -1}, r"context must be at least 1"),
    "context past the positions": ({"context": 257}, r"context=257 .*256 positions.*context=256 or less"),
    "no prefill": ({"prefill_tokens": 0}, r"prefill_tokens must be at least 1"),
    "small chunk": ({"chunk_nbytes": 4095}, r"chunk_nbytes must be at least 4096"),
    "unknown device": ({"device": "tpu"}, r"device='tpu' is not known; choose"),
    "no such device": ({"device": "cuda:99"}, r"device='cuda:99'"),
    "unknown dtype": ({"dtype": "float3"}, r"float3"),
    "integer dtype": ({"dtype": torch.int8}, r"int8"),
    "link without a gpu": ({"link": "12GB/s"}, r"link speed .*emulated"),
    "link nonsense": ({"device": "emulated", "gpu_memory": "1GiB", "link": "fast"}, r"link='fast'"),
    "link zero": ({"device": "emulated", "gpu_memory": "1GiB", "link": 0}, r"link=0"),
    "disk missing": ({"disk": "/nonexistent/folder"}, r"disk='/nonexistent/folder' is not a folder: create it"),
    "disk a file": ({"disk": __file__}, r"is not a folder"),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_is_refused_by_name(checkpoint: Path, what: str) -> None:
    arguments, said = NONSENSE[what]
    for call in (hetero.load, hetero.plan):
        with pytest.raises(ConfigError, match=said):
            call(checkpoint, **{"device": "cpu", "context": 64, **arguments})


@pytest.mark.parametrize("path", ["", "nothing/there", "/dev/null", "/nonexistent/model.gguf", "/nonexistent/"])
def test_a_model_that_is_not_there_is_an_error_of_ours(path: str) -> None:
    with pytest.raises(HeteroError):
        hetero.load(path, device="cpu")


def test_an_empty_folder_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(HeteroError, match=str(tmp_path)):
        hetero.load(tmp_path, device="cpu")


def test_everything_fits_at_the_context_of_one_token(checkpoint: Path) -> None:
    with hetero.load(checkpoint, device="cpu", cpu_memory="64MiB", context=1) as run, torch.no_grad():
        assert run.model(input_ids=IDS[:, :1]).logits.isfinite().all()
