"""A wrapped model trains as plain PyTorch does, bit for bit: every kind of module and of step, at every budget."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer
from transformers import AutoModelForCausalLM

import hetero
import tests.exact.zoo_models as zoo
import tests.exact.zoo_steps as steps
from hetero.planning import TooSmallError
from tests.exact.wrap_rig import (
    BUDGETS,
    Batch,
    Budget,
    Case,
    Notes,
    Reference,
    assert_same,
    budgets_for,
    build,
    check_training,
    loss_of,
    one_backward,
    open_run,
    state_of,
    train,
)
from tests.tiny_models import VOCAB, write_checkpoint

SOME = (BUDGETS[0], BUDGETS[2], BUDGETS[-2])

CASES: dict[str, Case] = {
    "tied": Case(lambda: zoo.Tied(by_storage=False), zoo.ids()),
    "tied-by-storage": Case(lambda: zoo.Tied(by_storage=True), zoo.ids()),
    "frozen": Case(zoo.partly_frozen, zoo.rows()),
    "one-row": Case(lambda: zoo.layers(5), zoo.rows(1)),
    "read-outside": Case(zoo.ReadOutside, zoo.ids()),
    "stacked": Case(zoo.Stacked, zoo.rows()),
    "listed": Case(zoo.Listed, zoo.rows(), is_steady=False),
    "descends": Case(zoo.Descends, zoo.rows(), is_steady=False),
    "custom-functions": Case(zoo.custom_functions, zoo.rows()),
    "shared": Case(zoo.Shared, zoo.rows()),
    "root-level": Case(zoo.Rooted, zoo.rows()),
    "overlapping": Case(zoo.overlapping, zoo.rows()),
    "odd-shapes": Case(zoo.Odd, zoo.rows()),
    "unused": Case(zoo.Unused, lambda: (torch.randn(int(torch.randint(4, 8, ())), zoo.WIDTH),), is_steady=False),
    "integers": Case(zoo.Integers, zoo.rows()),
    "complex": Case(zoo.complex_layers, zoo.rows()),
    "channels-last": Case(zoo.convolutions, zoo.images),
    "buffers": Case(zoo.Buffers, zoo.rows()),
    "aliased-buffer": Case(zoo.Aliased, zoo.rows()),
    "writers": Case(zoo.writers, zoo.ids()),
    "parametrized": Case(zoo.parametrized, zoo.rows()),
    "layer-drop": Case(zoo.LayerDrop, zoo.rows(), is_steady=False),
    "recursive": Case(zoo.Recursive, zoo.rows()),
    "experts": Case(zoo.two_layers_of_experts, zoo.rows(6), is_steady=False),
    "mixtral": Case(zoo.tiny_mixtral, zoo.ids(size=VOCAB), steps.causal_step, is_steady=False),
    "recurrent": Case(zoo.Recurrent, lambda: (torch.randn(6, 3, zoo.WIDTH),)),
    "attention": Case(zoo.Attention, lambda: (torch.randn(4, 4, zoo.WIDTH),)),
    "transformer": Case(zoo.Transformer, lambda: (torch.randn(2, 5, zoo.WIDTH), torch.randn(2, 4, zoo.WIDTH))),
    "t5": Case(zoo.tiny_t5, lambda: (torch.randint(1, 128, (2, 6)), torch.randint(1, 128, (2, 5))), steps.t5_step),
    "outputs": Case(zoo.Outputs, zoo.rows()),
    "sparse-gradients": Case(zoo.SparseGradient, zoo.ids()),
    "bf16": Case(lambda: zoo.layers(5).bfloat16(), lambda: (torch.randn(5, zoo.WIDTH).bfloat16(),)),
    "accumulation": Case(lambda: zoo.layers(4), zoo.rows(6), steps.accumulate),
    "interleaved": Case(lambda: zoo.layers(4), zoo.rows(6), steps.interleave),
    "penalty": Case(lambda: zoo.layers(5), zoo.rows(), steps.penalised),
    "large-activations": Case(lambda: zoo.layers(5), zoo.rows(80)),
    "writes": Case(lambda: zoo.layers(5), zoo.rows(), steps.write_between_passes),
    "writes-before-backward": Case(lambda: zoo.layers(5), zoo.rows(), steps.write_between_forward_and_backward),
    "replaced": Case(lambda: zoo.layers(5), zoo.rows(), steps.replace_data),
    "replaced-before-backward": Case(
        lambda: zoo.layers(5), zoo.rows(), steps.replace_data_between_forward_and_backward
    ),
    "swapped": Case(lambda: zoo.layers(5), zoo.rows(), steps.swap_for_evaluation, is_steady=False),
    "user-memory": Case(lambda: zoo.layers(5), zoo.rows(), steps.train_through_aliases, is_steady=False),
    "untied": Case(lambda: zoo.Tied(by_storage=True, depth=6), zoo.ids(), steps.untie, is_steady=False),
}


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Many tiny runs: a collection need not look at all of transformers, nor an addition wake a second thread."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module", params=list(CASES))
def reference(request: pytest.FixtureRequest) -> Reference:
    return Reference(CASES[request.param])


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
def test_training_is_that_of_plain_torch(reference: Reference, budget: Budget, tmp_path: Path, no_leaks: None) -> None:
    check_training(reference, budget, tmp_path)


# -- one row of fp32 ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def from_file(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A model that reads one token at a time, from a file whose tensors are at 8 modulo 16."""
    folder = write_checkpoint(tmp_path_factory.mktemp("file"), "llama", misaligned=True)

    def load() -> nn.Module:
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert all(parameter.data_ptr() % 16 == 8 for parameter in model.parameters())
        return model.train()  # type: ignore[no-any-return]

    return Reference(Case(load, lambda: (torch.randint(3, VOCAB, (1, 1)),), one_token))


def one_token(model: Any, batch: Batch, notes: Notes) -> None:
    """The bits of these products depend on the weights' addresses, so those are noted as well."""
    residues: list[int] = []

    def note(module: nn.Module, args: Any) -> None:
        residues.extend(parameter.data_ptr() % 64 for parameter in module.parameters(recurse=False))

    handles = [module.register_forward_pre_hook(note) for module in model.modules()]
    output = model(input_ids=batch[0], use_cache=False)
    for handle in handles:
        handle.remove()
    notes.add("logits", output.logits)
    notes.add("residues", torch.tensor(residues))
    loss_of(output.logits).backward()  # type: ignore[no-untyped-call]
    notes.gradients(model)


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
def test_one_row_of_fp32_is_that_of_from_pretrained(from_file: Reference, budget: Budget, tmp_path: Path) -> None:
    check_training(from_file, budget, tmp_path)


# -- weights changed under a graph -------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", SOME, ids=str)
@pytest.mark.parametrize(
    "name", ["tied", "read-outside", "custom-functions", "parametrized", "channels-last", "recurrent"]
)
def test_a_weight_changed_in_place_before_backward_raises_where_plain_torch_raises(
    name: str, budget: Budget, tmp_path: Path
) -> None:
    case = CASES[name]
    reference = Reference(case)
    plain, batches = build(case)
    model, _ = build(case)
    budgets = budgets_for(reference, budget, tmp_path)
    with open_run(model, budget.device, budgets, tmp_path) as run:
        outcomes = [changed_under_a_graph(each, batches[0]) for each in (model, plain)]
        assert budget.share == 1.0 or run.stats().executor["num_leases"] > 0
    for ours, theirs in zip(*outcomes, strict=True):
        assert_same(ours, theirs)
    assert any(not record for record in outcomes[1]), "nothing raised"
    assert any(record for record in outcomes[1]), "everything raised"


def changed_under_a_graph(model: Any, batch: Batch) -> list[Any]:
    """Per parameter that is changed in place: the gradients, or nothing where torch finds out."""
    records = []
    for changed in model.parameters():
        torch.manual_seed(3)
        model.zero_grad()
        loss = loss_of(model(*batch))
        with torch.no_grad():
            changed.mul_(1.5)
        notes = Notes()
        try:
            loss.backward()  # type: ignore[no-untyped-call]
            notes.gradients(model)
        except RuntimeError as error:  # torch words it otherwise for a view that a custom function made
            assert "modified by an inplace operation" in str(error) or "has been modified inplace" in str(error)
        records.append(notes.record)
    model.zero_grad()
    one_backward(model, batch, notes)
    records.append(notes.record)
    return records


# -- the end -----------------------------------------------------------------------------------------------------------

GLOBALS = (
    torch_module._global_forward_pre_hooks,
    torch_module._global_forward_hooks,
    torch_module._global_forward_hooks_always_called,
    torch_module._global_forward_hooks_with_kwargs,
    torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
    torch_module._global_parameter_registration_hooks,
    torch_module._global_module_registration_hooks,
    torch_module._global_buffer_registration_hooks,
    torch_optimizer._global_optimizer_pre_hooks,
    torch_optimizer._global_optimizer_post_hooks,
)


class Fails(nn.Module):
    """A part of a model that may raise, in forward or in backward."""

    where = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "forward":
            raise ZeroDivisionError
        if self.where == "backward":
            x.register_hook(self.fail)  # type: ignore[no-untyped-call]
        return x

    def fail(self, gradient: Tensor) -> Tensor:
        raise ZeroDivisionError


def model_that_may_fail() -> nn.Module:
    return nn.Sequential(zoo.layers(3), Fails(), zoo.layers(2))


def looks_of(model: nn.Module) -> list[Any]:
    """What a model is, apart from values."""
    modules = [
        (name, id(module), type(module), dict(module.__dict__), inspect.signature(module.forward))
        for name, module in model.named_modules()
    ]
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [modules, [(name, id(tensor), tensor.requires_grad, tensor.stride()) for name, tensor in tensors]]


@pytest.mark.parametrize("budget", SOME, ids=str)
@pytest.mark.parametrize("where", ["nowhere", "forward", "backward"])
def test_nothing_is_left_on_the_model_or_anywhere_else(
    budget: Budget, where: str, tmp_path: Path, no_leaks: None
) -> None:
    case = Case(model_that_may_fail, zoo.rows())
    reference = Reference(case)
    budgets = budgets_for(reference, budget, tmp_path)
    model, batches = build(case)
    looks, hooks = looks_of(model), [dict(hooks) for hooks in GLOBALS]
    with open_run(model, budget.device, budgets, tmp_path) as run:
        assert run.model is model
        assert looks_of(model) == looks
        train(case, model, batches)
        assert looks_of(model) == looks
        if where != "nowhere":
            part = next(module for module in model.modules() if isinstance(module, Fails))
            part.where = where
            with pytest.raises(ZeroDivisionError):
                train(case, model, batches)
            del part.where, part
    run.close()
    assert looks_of(model) == looks
    assert [dict(hooks) for hooks in GLOBALS] == hooks
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert list(tmp_path.iterdir()) == []
    if where == "nowhere":
        assert_same(state_of(model), reference.end)
    gone = weakref.ref(model)
    del model, run, looks
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("budget", SOME, ids=str)
def test_a_graph_made_before_the_end_goes_backward_after_it(budget: Budget, tmp_path: Path, no_leaks: None) -> None:
    case = CASES["large-activations"]
    budgets = budgets_for(Reference(case), budget, tmp_path)
    plain, batches = build(case)
    model, _ = build(case)
    with open_run(model, budget.device, budgets, tmp_path):
        loss = loss_of(model(*batches[0]))
    assert list(tmp_path.iterdir()) == []
    records = []
    for each, last in ((model, loss), (plain, loss_of(plain(*batches[0])))):
        notes = Notes()
        last.backward()  # type: ignore[no-untyped-call]
        notes.gradients(each)
        one_backward(each, batches[1], notes)
        records.append(notes.record)
    assert_same(*records)


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_a_refusal_changes_nothing(device: str, tmp_path: Path, no_leaks: None) -> None:
    model, _ = build(CASES["read-outside"])
    looks, hooks = looks_of(model), [dict(hooks) for hooks in GLOBALS]
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    sizes: dict[str, Any] = {"cpu_memory": "1MiB"} | ({"gpu_memory": "32KiB"} if device == "emulated" else {})
    with pytest.raises(TooSmallError):
        hetero.wrap(model, device=device, disk=tmp_path, **sizes)
    assert looks_of(model) == looks
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert [dict(hooks) for hooks in GLOBALS] == hooks
    assert list(tmp_path.iterdir()) == []
