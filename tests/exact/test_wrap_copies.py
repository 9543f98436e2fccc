"""Saved, copied, loaded and replaced in the middle of a run: others see true weights, and nothing of ours."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from hetero.wrapped import WrappedRun
from tests.exact.feature_rig import (
    DEVICES,
    WIDTH,
    Tower,
    assert_same,
    assert_streamed,
    batch,
    check,
    loss_of,
    tight,
    tight_budgets,
    tower,
    train,
)
from tests.tiny_models import VOCAB, tiny_model

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.parametrize("device", DEVICES)]
EXTRA_NBYTES = 4096


def twins(model: Any, num_steps: int = 3) -> tuple[Any, Any]:
    """A model, and a plain copy that has been trained as the wrapped one will be."""
    plain = copy.deepcopy(model)
    train(plain, num_steps)
    return model, plain


# -- state dicts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_is_true_and_can_be_loaded_back(device: str, assign: bool, tmp_path: Path) -> None:
    def session(model: Any) -> list[Any]:
        train(model, 2)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        seen = train(model, 2)
        model.load_state_dict(state, assign=assign)
        if assign:
            model.requires_grad_()
        return [state, seen, train(model, 3)]

    check(tower(), session, device, tmp_path)


def test_a_live_state_dict_follows_the_weights_within_a_plan(device: str, tmp_path: Path) -> None:
    model, plain = tower(), tower()
    train(plain, 3)
    with tight(model, device, tmp_path) as run:
        train(model, 3)
        mine, theirs = model.state_dict(), plain.state_dict()
        num_plans = run.num_plans
        train(model, 2)
        train(plain, 2)
        assert run.num_plans == num_plans
        assert_same(mine, theirs)
        assert_streamed(run)


def test_another_checkpoint_can_be_loaded_in_the_middle_of_a_run(device: str, tmp_path: Path) -> None:
    other = tower(5).state_dict()

    def session(model: Any) -> list[Any]:
        seen = train(model, 2)
        model.load_state_dict(other)
        return [seen, copy.deepcopy(model.state_dict()), train(model, 3)]

    check(tower(), session, device, tmp_path)


def test_the_optimizer_and_the_model_resume_from_a_file(device: str, tmp_path: Path) -> None:
    folder = tmp_path / "scratch"
    folder.mkdir()

    def session(model: Any) -> list[Any]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        train(model, 2, optimizer)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint")
        first = train(model, 3, optimizer)
        state = torch.load(tmp_path / "checkpoint", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer.load_state_dict(state["optimizer"])
        assert_same(train(model, 3, optimizer), first)
        return first

    check(tower(), session, device, folder)


# -- files -------------------------------------------------------------------------------------------------------------


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def pickle_in(content: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
        return archive.read(name)


def chain() -> Any:
    """A model of torch's own classes only."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(16)))


@pytest.mark.parametrize("what", ["model", "state dict"])
def test_a_saved_file_is_that_of_a_plain_model(device: str, what: str, tmp_path: Path) -> None:
    model, plain = twins(chain())
    get: Callable[[Any], Any] = (lambda m: m) if what == "model" else (lambda m: m.state_dict())
    with tight(model, device, tmp_path) as run:
        train(model, 3)
        assert_streamed(run)
        content, theirs = saved(get(model)), saved(get(plain))
        assert_same(train(model, 2), train(plain, 2))
    assert len(content) <= len(theirs) + EXTRA_NBYTES
    assert b"hetero" not in pickle_in(content)
    again = torch.load(io.BytesIO(content), weights_only=what == "state dict")
    expected = torch.load(io.BytesIO(theirs), weights_only=what == "state dict")
    if what == "model":
        assert_same(train(again), train(expected))
        again, expected = again.state_dict(), expected.state_dict()
    assert_same(again, expected)


def test_a_saved_model_needs_no_hetero_to_load(device: str, tmp_path: Path) -> None:
    model, plain = twins(chain())
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with tight(model, device, scratch) as run:
        train(model, 3)
        assert_streamed(run)
        torch.save(model, tmp_path / "model")
    x, _ = batch(0)
    torch.save((x, plain(x)), tmp_path / "example")
    code = (
        "import sys, torch\n"
        "sys.modules['hetero'] = None\n"
        "model = torch.load('model', weights_only=False)\n"
        "x, y = torch.load('example', weights_only=False)\n"
        "assert torch.equal(model(x), y)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=120)


def test_save_pretrained_writes_the_true_weights(device: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    def step(model: Any) -> None:
        ids = torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))
        model(input_ids=ids, labels=ids).loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None

    model, plain = tiny_model("llama"), tiny_model("llama")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    for _ in range(3):
        step(plain)
    plain.save_pretrained(tmp_path / "plain")
    with tight(model, device, scratch) as run:
        for _ in range(3):
            step(model)
        assert_streamed(run)
        model.save_pretrained(tmp_path / "ours", max_shard_size="200KB")
    names = {path.name for path in (tmp_path / "ours").iterdir()}
    assert sum(name.endswith(".safetensors") for name in names) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert_same(loaded.state_dict(), plain.state_dict())


# -- copies ------------------------------------------------------------------------------------------------------------


def assert_is_plain(model: Any, run: WrappedRun) -> None:
    """Memory of its own, and no hook or attribute that torch has not put there."""
    pristine = {type(module): set(vars(module)) for module in tower().modules()}
    theirs = {p.untyped_storage().data_ptr() for p in run.model.parameters()}
    for module in model.modules():
        if type(module) in pristine:
            assert set(vars(module)) <= pristine[type(module)]
        for name, value in vars(module).items():
            assert "hooks" not in name or not value, name
        assert type(module._parameters) is dict
    for p in model.parameters():
        assert type(p) is nn.Parameter
        assert p.untyped_storage().nbytes() <= p.numel() * p.element_size() + 256
        assert p.untyped_storage().data_ptr() not in theirs


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": lambda model: torch.load(io.BytesIO(saved(model)), weights_only=False),
}


@pytest.mark.parametrize("how", list(COPIES))
def test_a_copy_in_the_middle_of_a_run_is_a_plain_model(device: str, how: str, tmp_path: Path) -> None:
    model, plain = twins(tower())
    with tight(model, device, tmp_path) as run:
        train(model, 3)
        assert_streamed(run)
        twin = COPIES[how](model)
        assert_is_plain(twin, run)
        num_leases = run.stats().executor["num_leases"]
        expected = copy.deepcopy(plain)
        assert_same(train(twin), train(expected))
        assert run.stats().executor["num_leases"] == num_leases
        assert_same(train(model), train(plain))
        twin = COPIES[how](model)
    assert_same(train(twin, 2), train(copy.deepcopy(plain), 2))


def test_a_copy_made_inside_a_forward_is_true(device: str, tmp_path: Path) -> None:
    class Copying(Tower):
        copies: Any = ()

        def forward(self, x: Any) -> Any:
            out = super().forward(x)
            self.copies = [copy.deepcopy(self.blocks[2]), {n: p.clone() for n, p in self.named_parameters()}]
            return out

    def session(model: Any) -> list[Any]:
        seen = train(model, 3)
        block, values = model.copies
        model.copies = ()
        return [seen, block.state_dict(), values]

    torch.manual_seed(0)
    check(Copying(), session, device, tmp_path)


@pytest.mark.parametrize("kind", ["swa", "ema"])
def test_averages_of_the_weights_are_those_of_a_plain_model(device: str, kind: str, tmp_path: Path) -> None:
    def session(model: Any) -> list[Any]:
        ema = get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]
        average = AveragedModel(model, multi_avg_fn=ema if kind == "ema" else None)
        seen: list[Any] = []
        for _ in range(4):
            seen.append(train(model, 1))
            average.update_parameters(model)
            with torch.no_grad():
                seen.append(average(batch(3)[0]))
        update_bn([batch(0)[0]], average)
        return [seen, average.module.state_dict()]

    check(tower(), session, device, tmp_path)


def test_an_average_by_hand_swaps_its_weights_in_and_out(device: str, tmp_path: Path) -> None:
    def session(model: Any) -> list[Any]:
        shadow = {name: p.data.clone() for name, p in model.named_parameters()}
        seen: list[Any] = []
        for _ in range(3):
            seen.append(train(model, 1))
            for name, p in model.named_parameters():
                shadow[name].mul_(0.9).add_(p.data, alpha=0.1)
            backup = {name: p.data for name, p in model.named_parameters()}
            for name, p in model.named_parameters():
                p.data = shadow[name]
            with torch.no_grad():
                seen.append(model(batch(9)[0]))
            for name, p in model.named_parameters():
                p.data = backup[name]
        return seen

    check(tower(), session, device, tmp_path)


# -- written by others -------------------------------------------------------------------------------------------------


def through_a_vector(model: Any) -> Any:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 0.5, model.parameters())
    return vector.detach()


def through_numpy(model: Any) -> Any:
    for p in model.parameters():
        array = p.detach().numpy()
        array *= 0.5
    return [p.detach().clone() for p in model.parameters()]


def through_data(model: Any) -> None:
    for p in model.parameters():
        p.data.mul_(0.5)


def by_new_data(model: Any) -> None:
    for p in model.parameters():
        p.data = p.data * 0.5


def by_new_data_of_other_strides(model: Any) -> None:
    for block in model.blocks:
        block.up.weight.data = (block.up.weight.data * 0.5).t().contiguous().t()


def by_new_parameters(model: Any) -> None:
    for block in model.blocks:
        block.up.weight = nn.Parameter(block.up.weight.detach() * 0.5)


def by_initialisers(model: Any) -> None:
    torch.manual_seed(3)
    for block in model.blocks:
        nn.init.kaiming_uniform_(block.up.weight)
        block.down.reset_parameters()


def by_pruning(model: Any) -> None:
    from torch.nn.utils import prune

    for block in list(model.blocks)[:3]:
        prune.l1_unstructured(block.up, "weight", amount=0.3)  # type: ignore[no-untyped-call]
    for block in list(model.blocks)[:2]:
        prune.remove(block.up, "weight")  # type: ignore[no-untyped-call]


def by_a_parametrization(model: Any) -> None:
    torch.manual_seed(3)
    for block in list(model.blocks)[:3]:
        nn.utils.parametrizations.orthogonal(block.up)
        nn.utils.parametrizations.weight_norm(block.down)


def by_sharing(model: Any) -> None:
    model.blocks[1].up.weight = model.blocks[0].up.weight
    model.blocks[3] = model.blocks[2]


def by_fewer_layers(model: Any) -> None:
    del model.blocks[3:5]


def by_freezing(model: Any) -> None:
    model.blocks[:3].requires_grad_(False)


def by_wider_numbers(model: Any) -> None:
    model.to(torch.float64).to(torch.float32)


WRITERS = [
    through_a_vector,
    through_numpy,
    through_data,
    by_new_data,
    by_new_data_of_other_strides,
    by_new_parameters,
    by_initialisers,
    by_pruning,
    by_a_parametrization,
    by_sharing,
    by_fewer_layers,
    by_freezing,
    by_wider_numbers,
]


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__.replace("_", "-"))
@pytest.mark.parametrize("num_steps_before", [0, 1])
def test_whatever_writes_weights_writes_the_true_ones(
    device: str, write: Callable[[Any], Any], num_steps_before: int, tmp_path: Path
) -> None:
    """Before the first pass, or in the warm-up: at the next pass the plan moves weights."""

    def session(model: Any) -> list[Any]:
        return [train(model, num_steps_before), write(model), train(model, 3)]

    model = tower()
    more: dict[str, Any] = {}
    if write is by_a_parametrization:  # weight_norm makes parameters that look at the homes of the old ones
        kept_nbytes = sum(block.down.weight.nbytes for block in model.blocks)
        more = {tier: nbytes + kept_nbytes for tier, nbytes in tight_budgets(model, device, tmp_path).items()}
    check(model, session, device, tmp_path, **more)


@pytest.mark.parametrize(
    "write",
    [through_a_vector, by_new_data, by_new_parameters, by_a_parametrization, by_wider_numbers],
    ids=lambda write: write.__name__.replace("_", "-"),
)
def test_what_is_written_last_survives_the_end_of_the_run(
    device: str, write: Callable[[Any], Any], tmp_path: Path
) -> None:
    model, plain = twins(tower())
    expected = write(plain)
    with tight(model, device, tmp_path) as run:
        train(model, 3)
        assert_streamed(run)
        assert_same(write(model), expected)
    assert_same(model.state_dict(), plain.state_dict())
    assert_same(train(model), train(plain))


@pytest.mark.parametrize("is_followed_by_a_pass", [True, False])
def test_a_model_can_be_converted_in_the_middle_of_a_run(
    device: str, is_followed_by_a_pass: bool, tmp_path: Path
) -> None:
    def compute(model: Any) -> list[Any]:
        x, _ = batch(0)
        out = model(x.double())
        out.square().mean().backward()
        return [out.detach(), [p.grad for p in model.parameters()]]

    model, plain = twins(tower())
    plain.zero_grad()
    plain.to(torch.float64)
    with tight(model, device, tmp_path) as run:
        train(model, 3)
        model.zero_grad()
        assert_streamed(run)
        model.to(torch.float64)
        if is_followed_by_a_pass:
            assert_same(compute(model), compute(plain))
    assert next(model.parameters()).dtype == torch.float64
    assert_same(model.state_dict(), plain.state_dict())
    assert_same(compute(model), compute(plain))


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_can_be_resized_in_the_middle_of_a_run(device: str, tied: bool, tmp_path: Path) -> None:
    def run_llama(model: Any, vocabulary: int) -> list[Any]:
        seen: list[Any] = []
        for step in range(3):
            ids = torch.randint(3, vocabulary, (2, 12), generator=torch.Generator().manual_seed(step))
            out = model(input_ids=ids, labels=ids, use_cache=False)
            out.loss.backward()
            seen += [out.logits.detach(), [p.grad.clone() for p in model.parameters()]]
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.05 * p.grad
                    p.grad = None
        return seen

    def session(model: Any) -> list[Any]:
        seen = run_llama(model, VOCAB)
        torch.manual_seed(4)
        model.resize_token_embeddings(VOCAB + 16, mean_resizing=False)
        return [seen, run_llama(model, VOCAB + 16)]

    check(tiny_model("llama", tie_word_embeddings=tied), session, device, tmp_path)


def test_a_parameter_shared_by_two_wrapped_models_stays_one(device: str, tmp_path: Path) -> None:
    """Other modules, the same Parameter: what one model's run learns, the other's sees, in and after the runs."""

    def pair() -> tuple[Any, Any]:
        one, other = tower(1), tower(2)
        for mine, yours in zip(one.blocks, other.blocks, strict=True):
            mine.up.weight = yours.up.weight
        return one, other

    def session(one: Any, other: Any) -> list[Any]:
        return [[train(one, 1), train(other, 1)] for _ in range(3)]

    plain, ours = pair(), pair()
    folders = tmp_path / "one", tmp_path / "other"
    for folder in folders:
        folder.mkdir()
    theirs = session(*plain)
    # Each run sees the other look at the shared weights, so they stay where they are.
    shared_nbytes = sum(block.up.weight.nbytes for block in ours[0].blocks)
    budgets: dict[str, Any] = tight_budgets(ours[0], device, folders[0])
    budgets["cpu_memory"] += shared_nbytes
    with tight(ours[1], device, folders[1], **budgets) as second:
        with tight(ours[0], device, folders[0], **budgets) as first:
            assert_same(session(*ours), theirs)
            assert_streamed(first)
            assert_streamed(second)
        for mine, yours in zip(ours, plain, strict=True):
            assert_same(mine.state_dict(), yours.state_dict())
        assert_same(train(ours[1]), train(plain[1]))
    for mine, yours in zip(ours, plain, strict=True):
        assert_same(mine.state_dict(), yours.state_dict())


def test_weights_that_others_share_from_now_on_stay_where_they_are(device: str, tmp_path: Path) -> None:
    """`share_memory`, or sending a weight to another process, moves a storage under all who look at it."""

    def session(model: Any) -> list[Any]:
        seen = train(model, 3)
        for block in list(model.blocks)[:3]:
            block.share_memory()
        return [seen, train(model, 3)]

    model, plain = tower(), tower()
    theirs = session(plain)
    with tight(model, device, tmp_path) as run:
        assert_same(session(model), theirs)
        assert_streamed(run)
        addresses = [p.data_ptr() for p in model.blocks[0].parameters()]
    assert addresses == [p.data_ptr() for p in model.blocks[0].parameters()]
    assert all(p.is_shared() for p in model.blocks[0].parameters())
    assert_same(train(model), train(plain))


def test_numpy_sees_the_last_step(device: str, tmp_path: Path) -> None:
    model, plain = twins(tower())
    with tight(model, device, tmp_path) as run:
        train(model, 3)
        assert_streamed(run)
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert np.array_equal(mine.detach().numpy(), theirs.detach().numpy())
        assert torch.equal(loss_of(model, 8), loss_of(plain, 8))


def test_a_model_that_has_come_back_from_the_disk_can_be_saved(device: str, tmp_path: Path) -> None:
    """torch.save refuses nothing, and torch.load would refuse a storage that is no whole number of elements."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 63), nn.Linear(63, 41))
    path = tmp_path / "state.pt"
    with tight(model, device, tmp_path, trains=False) as run, torch.no_grad():
        model(torch.ones(2, 64))
        assert run.stats().executor["num_leases"] > 0
    for is_zip in (True, False):
        torch.save(model.state_dict(), path, _use_new_zipfile_serialization=is_zip)
        loaded = torch.load(path)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())
