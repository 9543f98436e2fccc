"""Gradients of a model that computes on another device than the one its weights come home to.

Note [a gradient is where its weight is]
    Between passes a parameter shows its home, and whoever reads its gradient (`clip_grad_norm_`, an optimizer) must
    find it on the same device. But autograd makes it where the forward computed, and adds it in place to the one that
    is there, which fails across devices. So:
    1. before a gradient is added, what an earlier backward left of one on another device is set aside (a hook on the
       parameter, which autograd calls first);
    2. when the backward ends, every gradient goes home, and is added there to what was set aside: in place, in torch's
       order, once per backward, so the sum has torch's bits;
    3. before any optimizer steps, states that were made when the weight was elsewhere follow it.
    A parameter that forwards show on the device and on its home in turn has one AccumulateGrad node for each lease;
    torch calls their hooks once each, and their sum is made in the order of the backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from hetero.memory.weights import WeightChunk

GRADIENTS = "gradients"
"""Whose bytes they are in the ledger."""


class Gradients:
    """Keeps gradients and optimizer states of a model's parameters on the devices of their homes.

    For devices whose tensors are not the CPU's; on the CPU there is nothing to do. `settle` blocks while bytes cross.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        chunks: Iterable[WeightChunk],
        device: torch.device,
        before_step: Callable[[], None],
    ) -> None:
        """`device` is where forwards compute; `before_step` is called before an optimizer changes a parameter."""
        self._device, self._tell_of_step = device, before_step
        self._parameters = {id(parameter): parameter for parameter in parameters}
        self._views = {id(view.parameter): (chunk, i) for chunk in chunks for i, view in enumerate(chunk.views)}
        self._handles: dict[int, Any] = {}
        self._parts: dict[int, list[Tensor]] = {}  # of the backward that runs, in its order
        self._earlier: dict[int, Tensor] = {}  # what backwards before it had left
        self._backwards: set[int] = set()
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._step_hook: Any = None

    def watch(self) -> None:
        """See the gradients of what is trainable now. Cheap when nothing is new."""
        if self._step_hook is None:
            self._step_hook = register_optimizer_step_pre_hook(self._before_step)
        for key, parameter in self._parameters.items():
            if parameter.requires_grad and key not in self._handles:
                hook: Callable[[Tensor], None] = partial(self._before_adding, key)
                self._handles[key] = parameter.register_hook(hook)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Bring home what is left, and remove every hook. Call it when the weights have their last homes."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        if self._step_hook is not None:
            self._step_hook.remove()
            self._step_hook = None
        self.settle()
        for optimizer in list(self._optimizers):
            self._follow(optimizer)

    def settle(self) -> None:
        """Make `p.grad` the whole gradient, on the device of p's home. One whose weight is leased waits for its end.

        Between passes. What a backward that raised has set aside is dropped where the user has set `p.grad` to None
        since.
        """
        for key, parameter in self._parameters.items():
            if parameter.grad is None and parameter.device == self._home_of(parameter):
                self._parts.pop(key, None)
                self._earlier.pop(key, None)
        self._settle_all()

    def _settle_all(self) -> None:
        self._backwards.clear()
        for key, parameter in self._parameters.items():
            if key in self._parts or key in self._earlier or parameter.grad is not None:
                self._settle(key, parameter)

    def _settle(self, key: int, parameter: nn.Parameter) -> None:
        home = self._home_of(parameter)
        if parameter.device != home:
            return
        now, earlier = parameter.grad, self._earlier.get(key)
        parts = self._parts.pop(key, [])
        if earlier is None and not parts and (now is None or now.device == home):
            return
        total: Tensor | None = None
        for part in [*parts, *([now] if now is not None else [])]:
            part = _moved(part, home)
            total = part if total is None else total + part
        if earlier is not None:
            earlier = _moved(earlier, home)
            if total is None or total.requires_grad or earlier.is_sparse:  # as torch adds these
                total = earlier if total is None else earlier + total
            else:
                with torch.no_grad():
                    total = earlier.add_(total)
        parameter.grad = None  # the setter compares with the old one's
        parameter.grad = total
        self._earlier.pop(key, None)

    def _before_adding(self, key: int, gradient: Tensor) -> None:
        """Autograd is about to add `gradient` to a parameter's."""
        parameter = self._parameters[key]
        task = torch._C._current_graph_task_id()
        if task not in self._backwards and task != -1:
            self._backwards.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(self._settle_all)
        there = parameter.grad
        is_first = key not in self._parts
        if is_first:
            self._parts[key] = []
        places = (gradient.device, self._home_of(parameter), self._device)
        if there is None or all(there.device.type == place.type for place in places):
            return
        with torch.no_grad():
            if is_first and key not in self._earlier:
                self._earlier[key] = there
            else:
                self._parts[key].append(there)
            parameter.grad = None

    def _home_of(self, parameter: nn.Parameter) -> torch.device:
        chunk, number = self._views.get(id(parameter), (None, 0))
        return parameter.device if chunk is None or number in chunk.away else chunk.base.device

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if any(id(p) in self._parameters for group in optimizer.param_groups for p in group["params"]):
            self._tell_of_step()
            self.settle()
            self._optimizers.add(optimizer)
            self._follow(optimizer)

    def _follow(self, optimizer: Optimizer) -> None:
        """Bring an optimizer's states to their weights, and steps where they must lie beside them: `fused` and
        `capturable` count on the device (https://docs.pytorch.org/docs/stable/optim.html)."""
        for group in optimizer.param_groups:
            takes_steps = bool(group.get("fused") or group.get("capturable"))
            for parameter in group["params"]:
                if id(parameter) not in self._parameters or parameter not in optimizer.state:
                    continue
                states = optimizer.state[parameter]
                for name, value in states.items():
                    if isinstance(value, Tensor) and (name != "step" or takes_steps):
                        states[name] = _moved(value, parameter.device)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor if tensor.device == device else tensor.to(device)
