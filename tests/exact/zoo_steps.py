"""What a training step may do before the optimizer's: several backwards, and writes to weights by every path."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.exact.wrap_rig import Batch, Notes, loss_of, one_backward


def t5_step(model: Any, batch: Batch, notes: Notes) -> None:
    output = model(input_ids=batch[0], labels=batch[1])
    notes.add("output", (output.loss, output.logits, output.encoder_last_hidden_state))
    output.loss.backward()
    notes.gradients(model)


def causal_step(model: Any, batch: Batch, notes: Notes) -> None:
    output = model(input_ids=batch[0], labels=batch[0], use_cache=False)
    notes.add("output", (output.loss, output.logits))
    output.loss.backward()
    notes.gradients(model)


def accumulate(model: Any, batch: Batch, notes: Notes) -> None:
    """Three micro-batches into one gradient."""
    for part in batch[0].split(2):
        loss = loss_of(model(part))
        loss.backward()  # type: ignore[no-untyped-call]
        notes.add("loss", loss)
        notes.gradients(model)


def interleave(model: Any, batch: Batch, notes: Notes) -> None:
    """Two graphs at once, backward in the order of the forwards, the first one twice; then three backwards of one."""
    first, second = (loss_of(model(part)) for part in batch[0].split(3))
    first.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    notes.gradients(model)
    second.backward()  # type: ignore[no-untyped-call]
    notes.gradients(model)
    with torch.no_grad():
        notes.add("evaluation", model(batch[0]))
    first.backward()  # type: ignore[no-untyped-call]
    notes.gradients(model)
    output = model(batch[0])
    for part in (output[0].sum(), output[1].square().sum()):
        part.backward(retain_graph=True)
        notes.gradients(model)
    for name, gradient in zip("abcdefgh", torch.autograd.grad(output.sum(), list(model.parameters())), strict=True):
        notes.add(f"grad {name}", gradient)


def penalised(model: Any, batch: Batch, notes: Notes) -> None:
    """A loss that reads weights outside any forward, and a parameter's gradient hook."""
    handle = model[1][0].weight.register_hook(lambda gradient: gradient * 0.5)
    output = model(*batch)
    penalty = sum((parameter.square().sum() for parameter in model.parameters()), torch.zeros(()))
    loss = loss_of(output) + 0.01 * penalty + 0.01 * (model[2][0].weight @ model[3][0].weight.t()).square().mean()
    notes.add("loss", loss)
    loss.backward()
    handle.remove()
    notes.gradients(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    notes.add("norm", norm)


# -- weights that change between passes --------------------------------------------------------------------------------


def write_between_passes(model: Any, batch: Batch, notes: Notes) -> None:
    """Every way to write to a parameter's memory, each followed by a forward and a backward."""
    for write in (_add_to_data, _write_through_numpy, _copy, _write_through_kept_view, _reset, _load):
        one_backward(model, batch, notes)
        write(model)
        notes.state(model)
        with torch.no_grad():
            notes.add("evaluation", model(*batch))


def _add_to_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.add_(0.01)


def _write_through_numpy(model: nn.Module) -> None:
    for parameter in model.parameters():
        array = parameter.detach().numpy()
        array[..., ::3] *= 0.5
        array.flat[0] = 0.25


def _copy(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.roll(1, 0))


def _write_through_kept_view(model: Any) -> None:
    view = model[1][0].weight.detach()[3:5]
    storage = model[2][0].weight.untyped_storage()
    with torch.no_grad():
        model[1][0].weight.mul_(0.9)
    view.sub_(0.1)
    storage[5] = 17


def _reset(model: Any) -> None:
    model[3][0].reset_parameters()


def _load(model: nn.Module) -> None:
    model.load_state_dict({name: tensor * 1.01 for name, tensor in model.state_dict().items()})


def write_between_forward_and_backward(model: Any, batch: Batch, notes: Notes) -> None:
    """Behind autograd's back: backward computes with the new values, plainly as well."""
    for write in (_add_to_data, _write_through_numpy):
        loss = loss_of(model(*batch))
        write(model)
        loss.backward()  # type: ignore[no-untyped-call]
        notes.gradients(model)
    loss = loss_of(model(*batch))
    _add_to_data(model)
    notes.add("evaluation", model(*batch))
    loss.backward()  # type: ignore[no-untyped-call]
    notes.gradients(model)


def replace_data(model: Any, batch: Batch, notes: Notes) -> None:
    """New tensors in the place of weights: of the same geometry, of another and back, many in one vector."""
    for factor in (0.9, 1.1):
        one_backward(model, batch, notes)
        for parameter in model.parameters():
            parameter.data = parameter.data * factor
        notes.state(model)
    one_backward(model, batch, notes)
    weight = model[1][0].weight
    weight.data, weight.grad = weight.data.t(), None
    one_backward(model, batch, notes)
    weight.data, weight.grad = weight.data.t().contiguous(), None
    one_backward(model, batch, notes)
    vector = nn.utils.parameters_to_vector(model.parameters()).detach() * 0.95
    nn.utils.vector_to_parameters(vector, model.parameters())
    del vector
    one_backward(model, batch, notes)


def replace_data_between_forward_and_backward(model: Any, batch: Batch, notes: Notes) -> None:
    """A graph goes backward with the tensors that its forward had."""
    loss = loss_of(model(*batch))
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.9
    notes.add("evaluation", model(*batch))
    loss.backward()  # type: ignore[no-untyped-call]
    notes.gradients(model)


def swap_for_evaluation(model: Any, batch: Batch, notes: Notes) -> None:
    """Averaged weights for an evaluation, the way many write it, with a graph that waits; then two weights swapped."""
    loss = loss_of(model(*batch))
    shadow = {name: parameter.detach().clone() * 0.5 for name, parameter in model.named_parameters()}
    backup = {}
    for name, parameter in model.named_parameters():
        backup[name] = parameter.data
        parameter.data = shadow[name]
    with torch.no_grad():
        notes.add("evaluation", model(*batch))
    for name, parameter in model.named_parameters():
        parameter.data = backup[name]
    notes.state(model)
    loss.backward()  # type: ignore[no-untyped-call]
    first, second = model[0][0].weight, model[2][0].weight
    first.data, second.data = second.data, first.data
    notes.state(model)
    one_backward(model, batch, notes)


def train_through_aliases(model: Any, batch: Batch, notes: Notes) -> None:
    """A parameter that shows a tensor of the user's own, which then shows what the optimizer does."""
    weight = model[1][0].weight
    own = getattr(model, "own", None)
    if own is None:
        own = model.own = weight.detach().clone()
        weight.data = own
    notes.add("own", own)
    one_backward(model, batch, notes)


def untie(model: Any, batch: Batch, notes: Notes) -> None:
    """Two parameters of one storage, of which one gets another."""
    one_backward(model, batch, notes)
    model.head.weight.data = model.head.weight.data * 0.5
    one_backward(model, batch, notes)
