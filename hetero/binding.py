"""How a loaded model's modules meet their weights: hooks that lease, row blocks for huge heads, rows for embeddings.

Note [released parameters]
    A parameter whose chunk is not leased views the placeholder (NaN), never nothing. It is bound to real bytes by its
    module's pre-hook and released by the post-hook, which runs also when the forward raises. When everything a module
    needs is resident and plain, it is bound once for ever and has no hook.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetero.guard import refuse_gradients
from hetero.io.errors import UnsupportedError
from hetero.layout import Layout, Weight
from hetero.materialize import Scratch, materialize
from hetero.memory.chunk import PlacedPart
from hetero.memory.executor import Executor
from hetero.memory.residency import Placeholder
from hetero.memory.states import Residency
from hetero.memory.trace import Recorder

Rows = Callable[[Tensor], Tensor]


class Leaser:
    """What every bound module shares: it asks the executor, and tells the recorder."""

    def __init__(self, executor: Executor, layout: Layout, scratch: Scratch, recorder: Recorder) -> None:
        self.executor = executor
        self.recorder = recorder
        self._scratch = scratch
        self._placed: dict[tuple[str, int], PlacedPart] = {}
        for chunk in layout.chunks:
            for placed in chunk.parts:
                self._placed[placed.part.name, chunk.chunk_id] = placed

    def acquire(self, name: str, chunk_ids: tuple[int, ...]) -> list[Residency]:
        self.recorder.request()
        entries = self.executor.acquire(chunk_ids)
        self.recorder.grant(name, chunk_ids)
        self._scratch.reset()
        return entries

    def tensor(self, weight: Weight, entry: Residency) -> Tensor:
        """The part of `weight` that the leased chunk holds. Valid until the lease ends or the scratch is reused."""
        key = (weight.source.name, entry.chunk.chunk_id)
        if not weight.is_plain:
            return materialize(weight, self.executor.bytes_of(entry), self._placed[key], self._scratch)
        view = entry.views.get(key)
        if view is None:
            view = materialize(weight, self.executor.bytes_of(entry), self._placed[key], self._scratch)
            entry.views[key] = view
        return view


class ModuleBinding:
    """The hooks of one module. Owns their handles; `remove` takes them off."""

    def __init__(
        self,
        path: str,
        module: nn.Module,
        weights: Sequence[tuple[nn.Parameter, Weight]],
        leaser: Leaser,
        placeholder: Placeholder,
    ) -> None:
        self._path = path
        self._weights = list(weights)
        self._leaser = leaser
        self._chunk_ids = tuple(dict.fromkeys(i for _, weight in weights for i in weight.chunk_ids))
        self._released = [placeholder.tensor(p.shape, p.stride(), p.dtype) for p, _ in weights]
        self._num_open = 0
        self._handles = [
            module.register_forward_pre_hook(self._before, with_kwargs=True),
            module.register_forward_hook(self._after, always_call=True),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def forget(self) -> None:
        """Release what a pass that was interrupted left bound; the executor has taken its leases back."""
        self._num_open = 0
        self._release()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            refuse_gradients(self._path, (*args, *kwargs.values(), *(parameter for parameter, _ in self._weights)))
        entries = self._leaser.acquire(self._path, self._chunk_ids)
        self._num_open += 1
        by_id = dict(zip(self._chunk_ids, entries, strict=True))
        for parameter, weight in self._weights:
            parameter.data = self._leaser.tensor(weight, by_id[weight.chunk_ids[0]])

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._num_open == 0:  # the lease itself failed
            return
        self._num_open -= 1
        self._release()
        self._leaser.executor.release(self._chunk_ids)

    def _release(self) -> None:
        for (parameter, _), released in zip(self._weights, self._released, strict=True):
            parameter.data = released


class RowBlockLinear(nn.Linear):
    """A linear layer without bias whose weight is larger than a chunk: computed by blocks of output rows.

    Each output element is the same dot product as in one call, so the bits are the same (forward only; the gradient
    of the input would be summed in another order).
    """

    _hetero_weight: Weight
    _hetero_leaser: Leaser
    _hetero_path: str

    @classmethod
    def over(cls, linear: nn.Linear, path: str, weight: Weight, leaser: Leaser) -> RowBlockLinear:
        """Return a module that shares everything with `linear` but the way it computes."""
        blocked = cls.__new__(cls)
        blocked.__dict__ = dict(linear.__dict__)
        blocked._hetero_path, blocked._hetero_weight, blocked._hetero_leaser = path, weight, leaser
        return blocked

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's own name)
        refuse_gradients(self._hetero_path, (input, self.weight))
        weight, leaser = self._hetero_weight, self._hetero_leaser
        out = input.new_empty(*input.shape[:-1], self.out_features)
        for chunk_id, first in zip(weight.chunk_ids, weight.first_rows, strict=True):
            (entry,) = leaser.acquire(self._hetero_path, (chunk_id,))
            try:
                block = leaser.tensor(weight, entry)
                out[..., first : first + block.shape[0]] = F.linear(input, block)
                del block
            finally:
                leaser.executor.release((chunk_id,))
        return out


class RowsParameter(nn.Parameter):
    """An embedding table that is not in memory: a look-up fetches the rows it needs and nothing else."""

    _hetero_rows: Rows

    @classmethod
    def over(cls, released: Tensor, rows: Rows) -> RowsParameter:
        """`rows(ids)` returns the table's rows for 1-D int64 ids, shape (len(ids), dim)."""
        parameter = torch.Tensor._make_subclass(cls, released, False)
        parameter._hetero_rows = rows
        return parameter

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding:
            return _look_up(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _look_up(
    input: Tensor,  # noqa: A002
    weight: RowsParameter,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    if max_norm is not None:
        raise UnsupportedError("an embedding with max_norm writes to its table; hetero.load reads tables from the file")
    refuse_gradients("the embedding", (weight,))
    num_rows = weight.shape[0]
    ids, inverse = torch.unique(input, return_inverse=True)
    if ids.numel() and not (int(ids[0]) >= 0 and int(ids[-1]) < num_rows):
        raise IndexError(f"token id {int(ids[0] if ids[0] < 0 else ids[-1])} is outside the table of {num_rows} rows")
    return F.embedding(inverse, weight._hetero_rows(ids))
