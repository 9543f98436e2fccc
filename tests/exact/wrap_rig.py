"""Trains a model twice, plain and wrapped, and compares every bit; finds budgets in which its weights must stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import hetero
from hetero.io.errors import OutOfMemoryError
from hetero.memory.gradients import GRADIENTS
from hetero.planning import TooSmallError
from hetero.wrapped import WrappedRun

NUM_STEPS = 5
SMALL_NBYTES = 4096
"""A parameter below this never moves, a saved tensor below this is not counted."""
PAGE_NBYTES = 4096
BOUNCE_NBYTES = 2 << 20
MAX_TRIES = 40

Batch = tuple[Any, ...]
Record = list[tuple[str, Tensor | None]]
Budgets = dict[str, int]


@dataclass(frozen=True, slots=True)
class Budget:
    """How much of the weights the first tier holds: a share of their bytes, or None for the least that works.

    `spills`: behind a gpu tier, the cpu tier does not hold them all either, so the disk is used.
    """

    device: str
    share: float | None
    spills: bool = False

    def __str__(self) -> str:
        share = "minimal" if self.share is None else f"{self.share:.0%}"
        return f"{self.device}-{share}{'-disk' if self.spills else ''}"


BUDGETS = (
    Budget("cpu", 1.0),
    Budget("cpu", 0.6),
    Budget("cpu", 0.3),
    Budget("cpu", None),
    Budget("emulated", 1.0),
    Budget("emulated", 0.6),
    Budget("emulated", 0.3, spills=True),
    Budget("emulated", None, spills=True),
)

# -- a case ------------------------------------------------------------------------------------------------------------


class Notes:
    """What one training run showed, in order."""

    def __init__(self) -> None:
        self.record: Record = []

    def add(self, name: str, value: Any) -> None:
        """Copy every tensor in a value: tensors, mappings, sequences, dataclasses."""
        for i, tensor in enumerate(tensors_of(value)):
            self.record.append((f"{name} {i}", copy_of(tensor)))

    def gradients(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            assert gradient is None or gradient.device == parameter.device, f"{name} and its gradient are apart"
            self.record.append((f"gradient of {name}", None if gradient is None else copy_of(gradient)))

    def state(self, model: nn.Module) -> None:
        """Parameters and buffers under every name that they have, persistent or not."""
        for name, tensor in [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]:
            self.record.append((name, copy_of(tensor)))


def copy_of(tensor: Tensor) -> Tensor:
    """What it holds now, in RAM."""
    return tensor.detach().clone().cpu()


Step = Callable[[Any, Batch, Notes], None]


def one_backward(model: Any, batch: Batch, notes: Notes) -> None:
    output = model(*batch)
    notes.add("output", output)
    loss = loss_of(output)
    notes.add("loss", loss)
    loss.backward()  # type: ignore[no-untyped-call]
    notes.gradients(model)


@dataclass(frozen=True, slots=True)
class Case:
    """A model, its data, and what one step does before the optimizer's. All three draw from the seeded generator.

    `is_steady`: every step uses every weight, so all of them get a place where the budget has one.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    step: Step = one_backward
    is_steady: bool = True


def tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)
    elif is_dataclass(value):
        for item in fields(value):
            yield from tensors_of(getattr(value, item.name))


def loss_of(output: Any) -> Tensor:
    """A scalar that every output with a gradient has a part in."""
    losses = [tensor.abs().square().mean() for tensor in tensors_of(output) if tensor.requires_grad]
    return torch.stack([loss.float() for loss in losses]).sum()


# -- training ----------------------------------------------------------------------------------------------------------


def build(case: Case) -> tuple[nn.Module, list[Batch]]:
    """The model and its batches, the same at every call. A deep copy would not do: it separates shared storages."""
    torch.manual_seed(0)
    model = case.build()
    return model, [case.batch() for _ in range(NUM_STEPS)]


def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
    # `foreach` is the default on a GPU only, and rounds bfloat16 otherwise.
    trainable = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trainable, lr=0.05, momentum=0.9, foreach=False)


def train(case: Case, model: nn.Module, batches: list[Batch], where: torch.device | None = None) -> Record:
    """Train one step per batch, moved to `where`, and note everything that can be seen."""
    torch.manual_seed(1)
    if where is not None:
        batches = [tuple(x.to(where) if isinstance(x, Tensor) else x for x in batch) for batch in batches]
    notes = Notes()
    optimizer = optimizer_for(model)
    for batch in batches:
        optimizer.zero_grad()
        case.step(model, batch, notes)
        optimizer.step()
        notes.state(model)
        notes.add("generator", torch.get_rng_state())
    return notes.record


def assert_same(ours: Record, theirs: Record) -> None:
    """Bit for bit, and the same dtypes and strides."""
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    for place, ((name, mine), (_, yours)) in enumerate(zip(ours, theirs, strict=True)):
        where = f"entry {place}, {name}"
        assert (mine is None) == (yours is None), f"{where}: {mine} where plain has {yours}"
        if mine is None or yours is None:
            continue
        assert mine.dtype == yours.dtype and mine.layout == yours.layout, where
        if mine.layout is torch.strided:
            assert mine.stride() == yours.stride(), where
        else:
            mine, yours = mine.to_dense(), yours.to_dense()
        assert not yours.is_floating_point() or not yours.isnan().any(), f"{where}: plain has NaN, which equals nothing"
        assert torch.equal(mine, yours), f"{where}: differs by up to {(mine - yours).abs().max()}"


# -- budgets -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of a model in training. `weights` are those parameters that may move, each storage's span once."""

    weights: int
    num_weights: int
    small: int
    gradients: int
    activations: int

    @property
    def fixed(self) -> int:
        return self.small + self.gradients + self.activations


def footprint_of(case: Case) -> Footprint:
    """Count in plain PyTorch. Activations are those of a whole step, so at most too many."""
    model, batches = build(case)
    spans: dict[int, tuple[int, int]] = {}
    small = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    for parameter in model.parameters():
        start, end = _span_of(parameter)
        if end - start < SMALL_NBYTES:
            small += parameter.numel() * parameter.element_size()
            continue
        key = parameter.untyped_storage().data_ptr()
        first, last = spans.get(key, (start, end))
        spans[key] = min(first, start), max(last, end)
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept = tensor.detach()
        if kept.layout is torch.strided and kept.numel() * kept.element_size() >= SMALL_NBYTES:
            address = kept.untyped_storage().data_ptr()
            own = [*model.parameters(), *model.buffers()]
            if all(address != tensor.untyped_storage().data_ptr() for tensor in own):
                saved[address] = kept
        return kept

    torch.manual_seed(1)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        case.step(model, batches[0], Notes())
    return Footprint(
        weights=sum(end - start for start, end in spans.values()),
        num_weights=len(spans),
        small=small,
        gradients=sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad),
        activations=sum(tensor.untyped_storage().nbytes() for tensor in saved.values()),
    )


def _span_of(parameter: Tensor) -> tuple[int, int]:
    if parameter.numel() == 0:
        return 0, 0
    reach = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    start, size = int(parameter.storage_offset()), parameter.element_size()
    return start * size, (start + reach + 1) * size


def open_run(model: nn.Module, device: str, budgets: Budgets, folder: Path) -> WrappedRun:
    sizes: dict[str, Any] = {f"{tier}_memory": nbytes for tier, nbytes in budgets.items()}
    run: WrappedRun = hetero.wrap(model, device=device, disk=folder, **sizes)
    return run


def least_needs(case: Case, device: str, folder: Path) -> Budgets:
    """What the refusal of a budget that is too small says it needs."""
    model, _ = build(case)
    try:
        open_run(model, device, _tiers(device), folder).close()
    except TooSmallError as error:
        return dict(error.needs)
    raise AssertionError("4096 bytes were enough")


def _tiers(device: str) -> Budgets:
    return {"cpu": 4096} | ({"gpu": 4096} if device != "cpu" else {})


def minimal_budgets(case: Case, device: str, folder: Path, where: torch.device | None = None) -> Budgets:
    """Start from almost nothing and do what each error says, until a step works."""
    budgets = _tiers(device)
    for _ in range(MAX_TRIES):
        model, batches = build(case)
        try:
            with open_run(model, device, budgets, folder):
                train(case, model, batches, where)
            return budgets
        except TooSmallError as error:
            budgets = dict(error.needs)
        except OutOfMemoryError as error:
            assert error.requested_nbytes > error.free_nbytes, f"{error}: it fits"
            budgets[error.tier] += error.requested_nbytes - error.free_nbytes
    raise AssertionError(f"still too small after {MAX_TRIES} tries: {budgets}")


def budgets_for(reference: Reference, budget: Budget, folder: Path) -> Budgets:
    """Bytes per tier: a share of the weights (at least one module's), and all that is no weight."""
    case, footprint = reference.case, reference.footprint
    if budget.share is None:
        if reference.where is None or not reference.least_on_gpu:
            return minimal_budgets(case, budget.device, folder, reference.where)
        return reference.least_on_gpu
    if budget.device not in reference.needs:
        reference.needs[budget.device] = least_needs(case, budget.device, folder)
    needs = reference.needs[budget.device]
    weights = round(budget.share * footprint.weights)
    if budget.device == "cpu":
        ring = needs["cpu"] - BOUNCE_NBYTES - footprint.small
        return {"cpu": BOUNCE_NBYTES + footprint.fixed + max(weights, ring)}
    ring = needs["gpu"] - footprint.small
    cpu = needs["cpu"] + (weights if budget.spills else footprint.weights)
    if reference.where is not None:  # each gradient goes home
        cpu += footprint.gradients
    rounding = PAGE_NBYTES * footprint.num_weights if budget.share == 1.0 else 0  # each is in pages of its own
    gpu = footprint.fixed + max(weights, ring) + rounding
    if reference.where is not None and budget.share != 1.0:  # nothing can be computed on its home instead
        if not reference.least_on_gpu:
            reference.least_on_gpu = minimal_budgets(case, budget.device, folder, reference.where)
        gpu, cpu = max(gpu, reference.least_on_gpu["gpu"]), max(cpu, reference.least_on_gpu["cpu"])
    return {"gpu": gpu, "cpu": cpu}


# -- the check ---------------------------------------------------------------------------------------------------------


class Reference:
    """A case trained plainly, once, for all budgets; `needs` are what refusals said, by device. `where` the wrapped
    one computes, and the plain one as well unless `plain_on_cpu`."""

    def __init__(self, case: Case, where: torch.device | None = None, *, plain_on_cpu: bool = False) -> None:
        self.case, self.where = case, where
        self.footprint = footprint_of(case)
        self.needs: dict[str, Budgets] = {}
        self.least_on_gpu: Budgets = {}
        model, batches = build(case)
        notes = Notes()
        notes.state(model)
        self.start = notes.record
        there = None if plain_on_cpu else where
        self.record = train(case, model if there is None else model.to(there), batches, there)
        notes = Notes()
        notes.state(model)
        self.end = notes.record


def check_training(reference: Reference, budget: Budget, folder: Path) -> WrappedRun:
    """Train in a budget; everything must be as it was plainly, during and after. Returns the closed run."""
    case = reference.case
    budgets = budgets_for(reference, budget, folder)
    model, batches = build(case)
    assert_same(state_of(model), reference.start)
    with open_run(model, budget.device, budgets, folder) as run:
        assert_same(train(case, model, batches, reference.where), reference.record)
        assert_streamed(run, case, budget, budgets)
    assert_same(state_of(model), reference.end)
    assert list(folder.iterdir()) == []
    return run


def state_of(model: nn.Module) -> Record:
    notes = Notes()
    notes.state(model)
    return notes.record


def assert_streamed(run: WrappedRun, case: Case, budget: Budget, budgets: Budgets) -> None:
    """The budget did what it is in the test for, and was kept."""
    stats = run.stats()
    for tier, nbytes in budgets.items():
        assert stats.tiers[tier].peak_nbytes <= nbytes
    assert run.plan.num_chunks > 0
    if budget.share == 1.0:
        assert run.plan.state == "planned"
        if budget.device == "cpu":
            assert stats.executor["num_leases"] == 0
        assert run.plan.num_streamed == 0 or not case.is_steady
        return
    assert run.plan.num_streamed > 0
    assert stats.executor["num_leases"] >= NUM_STEPS
    if budget.device == "cpu" or (budget.spills and GRADIENTS not in run.ledger.holders("cpu")):
        assert stats.executor["read_nbytes"] > 0
    if budget.device != "cpu":
        assert stats.executor["copied_nbytes"] > 0
