"""Tensors outside the model that share a weight's memory: they stay true, the ledger too, and nothing else pins."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetero
from hetero.io.errors import OutOfMemoryError
from hetero.memory.homes import WEIGHTS
from hetero.memory.weights import Place
from hetero.planning import TooSmallError
from hetero.wrapped import WrappedRun
from tests.exact.feature_rig import (
    DEVICES,
    WIDTH,
    assert_same,
    assert_streamed,
    backward,
    batch,
    tight,
    tight_budgets,
    tower,
    train,
)
from tests.tiny_models import VOCAB, tiny_model

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.parametrize("device", DEVICES)]

KEEPERS: dict[str, Callable[[Any], list[Tensor]]] = {
    "state dict": lambda module: list(module.state_dict().values()),
    "detach": lambda module: [p.detach() for p in module.parameters()],
    "data": lambda module: [p.data for p in module.parameters()],
    "numpy": lambda module: [torch.from_numpy(p.detach().numpy()) for p in module.parameters()],
    "slice": lambda module: [p.detach()[1:] for p in module.parameters()],
}


def nbytes_of(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters())


def roomy(model: Any, device: str, folder: Path, *kept: nn.Module) -> dict[str, Any]:
    """The tight budgets, and room for what is kept from leaving."""
    budgets: dict[str, Any] = tight_budgets(model, device, folder)
    budgets["cpu_memory"] += sum(map(nbytes_of, kept))
    return budgets


def assert_ledger_is_true(run: WrappedRun) -> None:
    homes = run.streaming.homes
    for tier in run.ledger.tiers():
        here = sum(c.nbytes for c in run.streaming.chunks if homes.tier_of(c.place) == tier and tier != "disk")
        assert run.ledger.holders(tier).get(WEIGHTS, 0) == here


@pytest.mark.parametrize("how", list(KEEPERS))
def test_what_was_kept_before_the_wrap_stays_an_alias_all_along(device: str, how: str, tmp_path: Path) -> None:
    model, plain = tower(), tower()
    budgets = roomy(model, device, tmp_path, *model.blocks[1:4])
    mine, theirs = ([a for block in m.blocks[1:4] for a in KEEPERS[how](block)] for m in (model, plain))
    with tight(model, device, tmp_path, **budgets) as run:
        for _ in range(4):
            assert_same(train(model, 1), train(plain, 1))
            assert_same(mine, theirs)
            assert_ledger_is_true(run)
        assert_streamed(run)
        assert run.num_plans > 0
        mine[0].mul_(0.5)
        theirs[0].mul_(0.5)
        assert_same(train(model, 2), train(plain, 2))
        kept = {c.name for c in run.streaming.watched()}
        assert kept == {f"blocks.{i}.{part}.weight" for i in (1, 2, 3) for part in ("up", "down")}
        told = [line for line in run.explain().splitlines() if "kept in cpu by tensors outside the model" in line]
        assert len(told) == len(kept)
    assert_same(mine, theirs)
    assert_same(train(model, 1), train(plain, 1))
    assert_same(mine, theirs)


@pytest.mark.parametrize("num_steps_before", [0, 1, 3])
def test_what_is_kept_in_a_run_stays_an_alias_and_is_let_go(device: str, num_steps_before: int, tmp_path: Path) -> None:
    model, plain = tower(), tower()
    with tight(model, device, tmp_path, **roomy(model, device, tmp_path, model)) as run:
        assert_same(train(model, num_steps_before), train(plain, num_steps_before))
        mine, theirs = model.state_dict(), plain.state_dict()
        places = [chunk.place for chunk in run.streaming.chunks]
        for _ in range(3):
            assert_same(train(model, 1), train(plain, 1))
            assert_same(mine, theirs)
            assert_ledger_is_true(run)
        assert [chunk.place for chunk in run.streaming.chunks] == places
        del mine
        run._is_due = True
        assert_same(train(model, 2), train(plain, 2))
        assert not run.streaming.watched()
        assert_ledger_is_true(run)


def test_room_is_made_with_what_nobody_keeps(device: str, tmp_path: Path) -> None:
    """Gradients are booked in the first training pass: weights leave for them."""
    model, plain = tower(), tower()
    budgets: dict[str, Any] = tight_budgets(model, device, tmp_path)
    first = "gpu_memory" if device == "emulated" else "cpu_memory"
    budgets["cpu_memory"] += nbytes_of(model)
    with tight(model, device, tmp_path, **budgets) as run, torch.no_grad():
        assert_same(model(batch(0)[0]), plain(batch(0)[0]))
        if device == "cpu":
            assert run.streaming.chunks[0].place is Place.FIRST
        mine, theirs = model.blocks[0].state_dict(), plain.blocks[0].state_dict()
        with torch.enable_grad():
            assert_same(train(model, 3), train(plain, 3))
        assert_same(mine, theirs)
        assert run.streaming.homes.is_watched(run.streaming.chunks[0])
        assert run.stats().tiers[first.split("_")[0]].peak_nbytes <= budgets[first]


def test_a_budget_that_what_is_kept_does_not_fit_into_is_refused(device: str, tmp_path: Path) -> None:
    model = tower()
    budgets: dict[str, Any] = tight_budgets(model, device, tmp_path)
    state = model.state_dict()
    weights = sum(p.nbytes for p in model.parameters() if p.nbytes >= 4096)
    budgets["cpu_memory"] = (2 << 20) + weights - 4096
    addresses = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(TooSmallError) as caught:
        hetero.wrap(model, device=device, disk=tmp_path, **budgets)
    message = str(caught.value)
    assert f"{weights} bytes of weights ('blocks.0.up.weight' for one) cannot leave cpu" in message
    assert "kept state_dict" in message and message.endswith("or raise cpu_memory.")
    assert [p.data_ptr() for p in model.parameters()] == addresses and not list(tmp_path.iterdir())
    budgets["cpu_memory"] = caught.value.needs["cpu"]
    with torch.no_grad(), hetero.wrap(model, device=device, disk=tmp_path, **budgets):
        assert_same(model(batch(0)[0]), tower()(batch(0)[0]))
    assert_same(state, tower().state_dict())


def test_room_that_is_missing_later_names_what_is_kept(device: str, tmp_path: Path) -> None:
    if device == "emulated":
        pytest.skip("its first tier keeps nothing of the user's")
    model = tower()
    budgets: dict[str, Any] = tight_budgets(model, device, tmp_path)
    weights = sum(p.nbytes for p in model.parameters() if p.nbytes >= 4096)
    budgets["cpu_memory"] = (2 << 20) + weights + 64 * 1024
    with hetero.wrap(model, device=device, disk=tmp_path, **budgets):
        state = model.state_dict()
        with pytest.raises(OutOfMemoryError, match="drop other references to them, such as a kept state_dict"):
            train(model, 1)
        del state
        assert_same(train(model, 2), train(tower(), 2))


# -- what does not count -----------------------------------------------------------------------------------------------


class Heads(nn.Module):
    """Weights in every way that torch's own modules keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.orthogonal = nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))
        self.old_normed = nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.low, self.high = nn.Linear(WIDTH, 16, bias=False), nn.Linear(16, WIDTH, bias=False)
        self.register_buffer("mask", torch.randn(WIDTH, WIDTH))
        self.out = nn.Linear(WIDTH, 64, bias=False)
        self.out.weight = self.table.weight

    def forward(self, x: Any) -> Any:
        x, _ = self.lstm(x + self.table.weight[: x.shape[1]].mean(0))
        x, _ = self.attention(x, x, x)
        x = self.orthogonal(self.normed(x)) + self.spectral(self.old_normed(x))
        x = self.base(x) + self.high(self.low(x))
        return self.out(x @ self.mask)


def flat() -> Any:
    """All parameters and buffers of a tower on one storage, as optimizers and loaders make it."""
    model = tower()
    model.register_buffer("scale", torch.ones(WIDTH))
    tensors = [*model.parameters(), *model.buffers()]
    whole = torch.cat([t.detach().flatten() for t in tensors])
    start = 0
    for tensor in tensors:
        tensor.data = whole[start : start + tensor.numel()].view(tensor.shape)
        start += tensor.numel()
    return model


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("kind", ["heads", "flat"])
def test_what_training_keeps_beside_a_model_pins_nothing(device: str, kind: str, tmp_path: Path) -> None:
    def session(model: Any, see: Callable[[], None]) -> list[Any]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu")
        x = batch(0)[0].view(4, 8, WIDTH)
        seen: list[Any] = []
        for step in range(3):
            optimizer.zero_grad(set_to_none=step == 1)
            loss = model(x).square().mean()
            vector = nn.utils.parameters_to_vector(model.parameters())
            backward(scaler.scale(loss))
            held = [p.grad for p in model.parameters()]
            scaler.step(optimizer)
            scaler.update()
            see()
            seen.append([loss.detach().clone(), vector.detach().clone(), [g.clone() for g in held if g is not None]])
        return seen

    torch.manual_seed(0)
    model = Heads() if kind == "heads" else flat()
    torch.manual_seed(0)
    plain = Heads() if kind == "heads" else flat()
    torch.manual_seed(1)
    theirs = session(plain, lambda: None)
    budgets: dict[str, Any] = tight_budgets(model, device, tmp_path)
    budgets = {tier: nbytes + (512 << 10) for tier, nbytes in budgets.items()}
    with hetero.wrap(model, device=device, disk=tmp_path, **budgets) as run:

        def see() -> None:
            assert [c.name for c in run.streaming.chunks if run.streaming.homes.is_watched(c)] == []

        see()
        torch.manual_seed(1)
        assert_same(session(model, see), theirs)
    assert_same(model.state_dict(), plain.state_dict())


def test_one_look_at_a_flat_buffer_keeps_all_of_it(device: str, tmp_path: Path) -> None:
    model = flat()
    budgets = roomy(model, device, tmp_path, model)
    bias = model.blocks[2].up.bias.detach()
    with hetero.wrap(model, device=device, disk=tmp_path, **budgets) as run:
        assert len(run.streaming.watched()) == len(run.streaming.chunks)
        del bias
        assert run.streaming.watched() == []


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_model_from_pretrained_is_free_to_move(device: str, family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder, scratch = tmp_path / "model", tmp_path / "scratch"
    scratch.mkdir()
    tiny_model(family).save_pretrained(folder)
    model, plain = (AutoModelForCausalLM.from_pretrained(folder) for _ in range(2))
    ids = torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))
    budgets: dict[str, Any] = tight_budgets(model, device, scratch, trains=False)
    with torch.no_grad(), hetero.wrap(model, device=device, disk=scratch, **budgets) as run:
        for _ in range(3):
            assert [c.name for c in run.streaming.chunks if run.streaming.homes.is_watched(c)] == []
            assert_same(model(input_ids=ids).logits, plain(input_ids=ids).logits)
        assert_streamed(run)


def test_a_copy_pins_nothing_nor_a_graph_that_has_ended(device: str, tmp_path: Path) -> None:
    model = tower()
    with tight(model, device, tmp_path) as run:
        twin, state = deepcopy(model), {name: p.clone() for name, p in model.state_dict().items()}
        loss = model(batch(0)[0]).square().mean()
        backward(loss)
        assert [c.name for c in run.streaming.chunks if run.streaming.homes.is_watched(c)] == []
        del twin, state
