"""Weights that are read outside their own module, where compute cannot read their homes.

On the CPU a home can be computed on by whoever reads it. On a GPU `x @ m.emb.weight.t()`, or attention that takes its
projection's weight without calling the projection, would meet a weight that lies in RAM. So during a pass every torch
function that gets such a parameter runs with the parameter's bytes on the device, and `p.device` says the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hetero.memory.unseen import unseen


class Borrower(Protocol):
    """Who can show a parameter's bytes on the device: the run."""

    def is_computing(self) -> bool:
        """Whether this thread is inside a pass."""

    def borrow(self, parameters: list[nn.Parameter]) -> Callable[[], None] | None:
        """Keep them there until what is returned is called. None: there is nothing to do. Blocks. Raises
        OutOfMemoryError."""


class OutsideReads(TorchFunctionMode):
    """On this thread's stack from `enter` to `leave`. Costs a few microseconds per torch function."""

    def __init__(self, parameters: Iterable[nn.Parameter], device: torch.device, borrower: Borrower) -> None:
        super().__init__()
        self._parameters = {id(parameter) for parameter in parameters}
        self._device, self._borrower = device, borrower
        self._is_entered = False

    def enter(self) -> None:
        self._is_entered = True
        torch._C._push_on_torch_function_stack(self)

    def leave(self) -> None:
        """Take it off the stack and leave others that came onto it meanwhile; nothing happens where it is not on it."""
        if not self._is_entered:
            return
        above = []
        while torch._C._len_torch_function_stack():
            mode = torch._C._pop_torch_function_stack()
            if mode is self:
                break
            above.append(mode)
        for mode in reversed(above):
            torch._C._push_on_torch_function_stack(mode)
        self._is_entered = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        mine = {id(p): p for p in self._ours(args)} | {id(p): p for p in self._ours(kwargs.values())}
        if not mine or not self._borrower.is_computing():  # an interrupted pass has left the mode on its thread
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") in ("__get__", "__set__"):
            if func == _get_device:
                return self._device
            if getattr(getattr(func, "__self__", None), "__name__", "") not in _VIEWS:
                return func(*args, **kwargs)
        with unseen():
            give_back = self._borrower.borrow(list(mine.values()))
        if give_back is None:
            return func(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        finally:
            with unseen():
                give_back()

    def _ours(self, values: Iterable[Any]) -> Iterator[nn.Parameter]:
        for value in values:
            if isinstance(value, nn.Parameter):
                if id(value) in self._parameters:
                    yield value
            elif isinstance(value, (list, tuple)):
                yield from self._ours(value)


_VIEWS = ("T", "H", "mT", "mH", "real", "imag")
"""Attributes whose value can be computed on."""
_get_device: Callable[[Tensor], torch.device] = Tensor.device.__get__
