"""Streamed logits are transformers' own, bit for bit, at every budget and on every device that CI has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import hetero
from hetero.planning import TooSmallError
from tests.tiny_models import VOCAB, write_checkpoint

CONTEXT = 64
PROMPT = 13
STEPS = 8
CHUNK_NBYTES = 48 << 10
BUDGETS = ("100%", "60%", "30%", "smallest")

CASES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "llama-tied": {"family": "llama", "tied": True},
    "llama-sharded": {"family": "llama", "max_shard_size": "200KB"},
    "llama-misaligned": {"family": "llama", "misaligned": True},
    "llama-bf16": {"family": "llama", "dtype": torch.bfloat16},
    "qwen3": {"family": "qwen3"},
    "qwen3-tied-sharded": {"family": "qwen3", "tied": True, "max_shard_size": "200KB"},
    "gemma2": {"family": "gemma2"},
    "gemma2-misaligned": {"family": "gemma2", "misaligned": True},
    "gpt2": {"family": "gpt2"},
    "gpt2-untied-bf16": {"family": "gpt2", "tied": False, "dtype": torch.bfloat16},
    "mixtral": {"family": "mixtral"},
    "mixtral-misaligned-sharded": {"family": "mixtral", "misaligned": True, "max_shard_size": "200KB"},
}


@pytest.fixture(scope="module", params=list(CASES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    folder = write_checkpoint(tmp_path_factory.mktemp(request.param), **CASES[request.param])
    yield folder, reference_logits(folder)


def reference_logits(folder: Path) -> list[torch.Tensor]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    model.eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return decode(model)


def decode(model: Any) -> list[torch.Tensor]:
    """Logits of a prefill and of greedy steps after it."""
    torch.manual_seed(1)
    ids = torch.randint(3, VOCAB, (1, PROMPT))
    cache = DynamicCache(config=model.config)
    logits = []
    with torch.no_grad():
        for _ in range(STEPS + 1):
            out = model(input_ids=ids, cache=cache, use_cache=True).logits
            logits.append(out.clone())
            ids = out[:, -1:].argmax(-1)
    return logits


def smallest(folder: Path, device: str) -> dict[str, int]:
    """The budgets that the error names."""
    gpu = {"gpu_memory": 4096} if device == "emulated" else {}
    with pytest.raises(TooSmallError) as caught:
        hetero.load(folder, device=device, cpu_memory=4096, context=CONTEXT, chunk_nbytes=CHUNK_NBYTES, **gpu)
    return caught.value.needs


def budgets_for(folder: Path, device: str, share: str) -> dict[str, Any]:
    needs = smallest(folder, device)
    if share == "smallest":
        return {f"{tier}_memory": nbytes for tier, nbytes in needs.items()}
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    extra = weights * int(share.rstrip("%")) // 100
    if device == "cpu":
        return {"cpu_memory": needs["cpu"] + extra}
    return {"gpu_memory": needs["gpu"] + extra // 3, "cpu_memory": needs["cpu"] + extra * 2 // 3}


@pytest.mark.parametrize("share", BUDGETS)
@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_logits_are_those_of_transformers(
    case: tuple[Path, list[torch.Tensor]], device: str, share: str, no_leaks: None
) -> None:
    folder, reference = case
    budgets = budgets_for(folder, device, share)
    with hetero.load(folder, device=device, context=CONTEXT, chunk_nbytes=CHUNK_NBYTES, **budgets) as run:
        if hasattr(run.model, "set_experts_implementation"):
            run.model.set_experts_implementation("eager")
        assert share == "100%" or run.executor.stats.num_reads > 0, "nothing was streamed"
        logits = decode(run.model)
        for tier in run.ledger.tiers():
            assert run.ledger.peak(tier) <= budgets[f"{tier}_memory"]
        assert run.engine_stats().written_nbytes == 0
        assert run.executor.stats.num_demands == 0
    for step, (ours, theirs) in enumerate(zip(logits, reference, strict=True)):
        assert torch.equal(ours, theirs), f"step {step}: differs by up to {(ours - theirs).abs().max()}"
