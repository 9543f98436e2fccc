"""SmolLM2 from its packed GGUF file computes what transformers computes from the dequantised weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hetero
from hetero.planning import TooSmallError
from tests.exact.test_zoo import PROMPT, STEPS

CONTEXT = 160


@pytest.fixture(scope="module")
def reference(smollm2_gguf: Path) -> list[torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    return greedy(model.eval())


def greedy(model: Any) -> list[torch.Tensor]:
    from transformers import DynamicCache

    torch.manual_seed(1)
    ids = torch.randint(3, 40_000, (1, PROMPT))
    cache = DynamicCache(config=model.config)
    logits = []
    with torch.no_grad():
        for _ in range(STEPS + 1):
            out = model(input_ids=ids, cache=cache, use_cache=True).logits
            logits.append(out.clone())
            ids = out[:, -1:].argmax(-1)
    return logits


def budgets(path: Path, device: str, share: int | None) -> dict[str, Any]:
    gpu = {"gpu_memory": 4096} if device == "emulated" else {}
    with pytest.raises(TooSmallError) as caught:
        hetero.load(path, device=device, cpu_memory=4096, context=CONTEXT, **gpu)
    needs = caught.value.needs
    if share is None:
        return {f"{tier}_memory": nbytes for tier, nbytes in needs.items()}
    extra = path.stat().st_size * share // 100
    if device == "cpu":
        return {"cpu_memory": needs["cpu"] + extra}
    return {"gpu_memory": needs["gpu"] + extra // 3, "cpu_memory": needs["cpu"] + extra * 2 // 3}


@pytest.mark.slow
@pytest.mark.parametrize("share", [110, 60, 30, None], ids=["all", "60%", "30%", "smallest"])
@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_logits_are_those_of_transformers(
    smollm2_gguf: Path, reference: list[torch.Tensor], device: str, share: int | None, no_leaks: None
) -> None:
    limits = budgets(smollm2_gguf, device, share)
    with hetero.load(smollm2_gguf, device=device, context=CONTEXT, **limits) as run:
        logits = greedy(run.model)
        for tier in run.ledger.tiers():
            assert run.ledger.peak(tier) <= limits[f"{tier}_memory"]
    for step, (ours, theirs) in enumerate(zip(logits, reference, strict=True)):
        assert torch.equal(ours, theirs), f"step {step}: differs by up to {(ours - theirs).abs().max()}"


def test_the_answer_is_the_same_at_every_budget(smollm2_gguf: Path, no_leaks: None) -> None:
    prompt = "What is the capital of France?"
    answers = []
    for limits in (
        {"device": "cpu", "cpu_memory": "1GiB"},
        {"device": "cpu", **budgets(smollm2_gguf, "cpu", None)},
        {"device": "emulated", "gpu_memory": "24MiB", "cpu_memory": "48MiB"},
    ):
        with hetero.load(smollm2_gguf, context=CONTEXT, **limits) as run:
            segments = list(run.stream(prompt, max_tokens=12))
        answers.append([segment.token for segment in segments])
        assert "".join(segment.text for segment in segments) == "The capital of France is Paris."
    assert answers[0] == answers[1] == answers[2]
