"""Joins a model to its tiers: every parameter bound for ever, leased by hooks, computed by blocks, or read by rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from hetero.binding import Leaser, ModuleBinding, RowBlockLinear, RowsParameter
from hetero.io.engine import Engine, File
from hetero.layout import Weight
from hetero.materialize import Scratch
from hetero.memory.device import ArenaLike, Device
from hetero.memory.executor import Executor
from hetero.memory.residency import Placeholder, alias
from hetero.memory.trace import Recorder
from hetero.planning import ROWS_NBYTES, Decision
from hetero.rows import TableRows
from hetero.tiers import Tiers, put


class Assembly:
    """The bindings of one model. `remove` takes every hook off; the parameters stay as they are.

    `released` names the parameters that show the placeholder between leases.
    """

    def __init__(
        self,
        model: nn.Module,
        decision: Decision,
        *,
        tiers: Tiers,
        executor: Executor,
        device: Device,
        engine: Engine,
        files: Mapping[Path, File],
        recorder: Recorder,
    ) -> None:
        self.model, self.bindings = model, list[ModuleBinding]()
        self._decision, self._tiers, self._executor = decision, tiers, executor
        self._device, self._engine, self._files = device, engine, files
        self._rows_memory: tuple[ArenaLike, Tensor] | None = None
        layout, torch_device = decision.layout, device.torch_device
        scratch = Scratch(decision.scratch_nbytes, torch_device)
        self._leaser = Leaser(executor, layout, scratch, recorder)
        weights = {**layout.weights, **layout.tables}
        largest = max((w.source.nbytes // w.row_nbytes * w.num_cols * 8 for w in weights.values()), default=16)
        self._placeholder = Placeholder(largest, torch_device)
        by_name = {name: weight for weight in weights.values() for name in weight.source.names}
        parameters = {name: self._parameter(weight) for name, weight in weights.items()}
        for name, weight in by_name.items():
            put(model, name, parameters[weight.source.name])
        for path, module in list(model.named_modules()):
            self._bind_module(path, module, by_name)

    @property
    def is_needed(self) -> bool:
        """Whether anything of ours runs inside a forward."""
        return bool(self.bindings) or any(isinstance(m, RowBlockLinear) for m in self.model.modules())

    @property
    def released(self) -> list[str]:
        named = self.model.named_parameters(remove_duplicate=False)
        return [name for name, parameter in named if self._placeholder.holds(parameter)]

    def forget(self) -> None:
        """After an interrupted pass: no module holds a lease any more."""
        for binding in self.bindings:
            binding.forget()

    def remove(self) -> None:
        for binding in self.bindings:
            binding.remove()
        self._rows_memory = None

    def _is_fixed(self, weight: Weight) -> bool:
        return weight.is_plain and not weight.is_split and self._executor.is_resident(weight.chunk_ids[0])

    def _parameter(self, weight: Weight) -> nn.Parameter:
        if self._is_fixed(weight):
            with self._executor.lease(weight.chunk_ids) as (entry,):
                return nn.Parameter(self._leaser.tensor(weight, entry), requires_grad=False)
        shape = weight.source.shape
        strides = torch.empty(shape, device="meta").stride()
        released = self._placeholder.tensor(shape, strides, weight.dtype)
        if self._is_table(weight):
            return RowsParameter.over(released, self._rows_of(weight))
        return nn.Parameter(released, requires_grad=False)

    def _is_table(self, weight: Weight) -> bool:
        modules = (self.model.get_submodule(name.rpartition(".")[0]) for name in weight.source.names)
        return any(isinstance(module, nn.Embedding) for module in modules)

    def _rows_of(self, weight: Weight) -> TableRows:
        if self._rows_memory is None:
            buffer = self._tiers.allocate("cpu", ROWS_NBYTES, "embedding rows", is_reserved=True)
            self._rows_memory = buffer, alias(buffer.address, ROWS_NBYTES, torch.device("cpu"), lambda: None)
        buffer, buffer_bytes = self._rows_memory
        return TableRows(
            weight,
            self._decision.layout,
            self._executor,
            self._engine,
            self._files,
            buffer,
            buffer_bytes,
            self._device.torch_device,
        )

    def _bind_module(self, path: str, module: nn.Module, by_name: Mapping[str, Weight]) -> None:
        owned = []
        for name, parameter in module._parameters.items():
            weight = by_name.get(f"{path}.{name}" if path else name)
            if weight is not None and parameter is not None and not self._is_fixed(weight):
                owned.append((parameter, weight))
        if not owned or isinstance(module, nn.Embedding):
            return
        if any(weight.is_split for _, weight in owned):
            assert type(module) is nn.Linear
            self.model.set_submodule(path, RowBlockLinear.over(module, path, owned[0][1], self._leaser))
        else:
            self.bindings.append(ModuleBinding(path, module, owned, self._leaser, self._placeholder))
