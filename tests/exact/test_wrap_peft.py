"""PEFT's own layers over a streamed, frozen base: trained, saved, merged and switched as plainly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from tests.exact.feature_rig import DEVICES, assert_same, assert_streamed, backward, check, gradients, tight
from tests.tiny_models import VOCAB, tiny_model

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT asks for it
]

NUM_STEPS = 3
LAYERS = ["q_proj", "v_proj", "down_proj"]
CONFIGS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(r=4, target_modules=LAYERS, init_lora_weights=False, lora_dropout=0.1),
    "dora": lambda: peft.LoraConfig(r=4, target_modules=LAYERS, init_lora_weights=False, use_dora=True),
    "lora with a trained head": lambda: peft.LoraConfig(r=4, target_modules=LAYERS, modules_to_save=["lm_head"]),
    "lora on the embedding": lambda: peft.LoraConfig(
        r=4, target_modules=["embed_tokens", "q_proj"], init_lora_weights=False
    ),
    "ia3": lambda: peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False
    ),
    "prompt tuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def adapted(name: str) -> Any:
    torch.manual_seed(3)
    return peft.get_peft_model(tiny_model("llama"), CONFIGS[name]())


def ids_of(seed: int) -> Tensor:
    return torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(seed))


def train(model: Any, num_steps: int = NUM_STEPS) -> list[Any]:
    """Losses and gradients."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    model.train()
    seen: list[Any] = []
    for step in range(num_steps):
        ids = ids_of(step)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        backward(loss)
        seen += [loss.detach(), gradients(model)]
        optimizer.step()
    return seen


def logits_of(model: Any) -> Tensor:
    model.eval()
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids_of(99)).logits
    return logits


@pytest.mark.parametrize("name", CONFIGS)
def test_adapters_train_as_plainly(name: str, device: str, tmp_path: Path) -> None:
    check(adapted(name), lambda model: [*train(model), logits_of(model)], device, tmp_path)


def test_an_adapter_is_switched_off_merged_and_unmerged(device: str, tmp_path: Path) -> None:
    def session(model: Any) -> list[Tensor]:
        train(model, 2)
        seen = [logits_of(model)]
        with model.disable_adapter():
            seen.append(logits_of(model))
        model.merge_adapter()
        seen.append(logits_of(model))
        model.unmerge_adapter()
        return [*seen, logits_of(model)]

    check(adapted("lora"), session, device, tmp_path)


def test_a_second_adapter_is_added_and_trained_inside_the_run(device: str, tmp_path: Path) -> None:
    def session(model: Any) -> list[Any]:
        seen = train(model, 2)
        torch.manual_seed(5)
        model.add_adapter("other", CONFIGS["lora"]())
        model.set_adapter("other")
        return [*seen, *train(model, 2), logits_of(model)]

    check(adapted("lora"), session, device, tmp_path)


def test_saved_adapters_are_those_of_plain_training(device: str, tmp_path: Path) -> None:
    plain, model = adapted("lora"), adapted("lora")
    torch.manual_seed(7)
    train(plain)
    plain.save_pretrained(tmp_path / "plain")
    folder = tmp_path / "scratch"
    folder.mkdir()
    with tight(model, device, folder) as run:
        torch.manual_seed(7)
        train(model)
        model.save_pretrained(tmp_path / "wrapped")
        assert_streamed(run)
    names = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "wrapped").iterdir())
    for name in names:
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "wrapped" / name).read_bytes(), name
    again = peft.PeftModel.from_pretrained(tiny_model("llama"), tmp_path / "wrapped")
    assert_same(logits_of(again), logits_of(plain))


def test_a_frozen_base_is_never_written_to_disk_again(device: str, tmp_path: Path) -> None:
    with tight(adapted("lora"), device, tmp_path) as run:
        train(run.model, 2)
        written = run.stats().disk_written_nbytes - run.stats().activations_out_nbytes
        train(run.model, 3)
        assert_streamed(run)
        assert run.stats().disk_written_nbytes - run.stats().activations_out_nbytes == written
