"""What a streamed model refuses: whatever would read, move or differentiate weights that are elsewhere at the time.

Note [refused, never wrong]
    A released weight reads NaN (see binding.py). Inside a forward its module has the real one; everything that walks
    over a model's parameters from outside would see NaN instead: state_dict, save_pretrained, load_state_dict,
    deepcopy, pickle, `to`, `half`, `cuda`. And autograd would keep a Parameter whose data is swapped before backward
    reads it. Each is refused by name, on the streamed modules and on all that contain them. A model whose weights are
    all resident is an ordinary one and has no guard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Self, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hetero.io.errors import UnsupportedError


class Guard:
    """Refuses on `model` what Note [refused, never wrong] lists. Owns the hooks and instance attributes it sets.

    `streamed` are the paths of the modules whose weights stream, `checkpoint` is where the user's own bytes are.
    """

    def __init__(self, model: nn.Module, streamed: Iterable[str], checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        paths = {""} | {path for leaf in streamed for path in _with_parents(leaf)}
        self._modules = [model.get_submodule(path) for path in sorted(paths)]
        self._handles: list[RemovableHandle] = []
        self._attributes: list[tuple[nn.Module, str]] = []
        for module in self._modules:
            hooks: Any = module  # torch leaves these two untyped
            self._handles.append(hooks.register_state_dict_pre_hook(partial(self._refuse, "state_dict()")))
            self._handles.append(hooks.register_load_state_dict_pre_hook(partial(self._refuse, "load_state_dict()")))
            self._set(module, "_apply", partial(self._apply, module))
            # Instance attributes: copy and pickle ask the object, not its class.
            self._set(module, "__reduce_ex__", partial(self._refuse, "a copy or a pickle"))
            if hasattr(module, "save_pretrained"):
                self._set(module, "save_pretrained", partial(self._refuse, "save_pretrained()"))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for module, name in self._attributes:
            module.__dict__.pop(name, None)
        self._attributes.clear()

    def _set(self, module: nn.Module, name: str, value: Callable[..., Any]) -> None:
        module.__dict__[name] = value
        self._attributes.append((module, name))

    def _refuse(self, what: str, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(
            f"{what} of a model whose weights stream: most of them are not in memory. The original checkpoint is "
            f"untouched at {self._checkpoint}: use that, and give hetero.load the dtype and device you want"
        )

    def _apply(self, module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self | nn.Module:
        """Let a conversion pass that changes nothing (`model.to("cpu")` on the CPU); refuse any other."""
        tensors = [*module.parameters(), *module.buffers()]
        for dtype, device in {(tensor.dtype, tensor.device) for tensor in tensors}:
            probe = torch.empty(1, dtype=dtype, device=device)
            if fn(probe) is not probe or (device.type == "cpu" and cast(Any, probe).is_shared()):
                self._refuse("to(), half(), cuda() or another conversion")
        return module


def refuse_gradients(path: str, tensors: Iterable[Any]) -> None:
    """Raise UnsupportedError if autograd would record what a streamed module computes from `tensors`."""
    if torch.is_grad_enabled() and any(isinstance(each, Tensor) and each.requires_grad for each in tensors):
        raise UnsupportedError(
            f"{path}: gradients through streamed weights are not computed by a model from hetero.load, which is for "
            "inference; call it under torch.no_grad(), and freeze it with requires_grad_(False)"
        )


def _with_parents(path: str) -> list[str]:
    steps = path.split(".")
    return [".".join(steps[: depth + 1]) for depth in range(len(steps))]
