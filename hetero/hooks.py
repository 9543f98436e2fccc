"""Sees the forwards of a model's modules, without putting anything on them.

The hooks are torch's global ones: a deep copy, a pickle or a saved module carries nothing of ours along. They run for
every module of the process, and return at once for those of other models.
"""

from __future__ import annotations

import sys
import threading
from contextlib import nullcontext
from functools import partial
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from hetero.memory.unseen import unseen
from hetero.turns import Holder, Turn, waits_for_this


class Listener(Protocol):
    """What wants to know. What `enter` and `begin_pass` raise reaches the model's caller."""

    def begin_backward(self) -> None:
        """Something happens inside a backward: it begins, unless it has already."""

    def begin_pass(self, *, in_backward: bool) -> None:
        """The outermost module starts. `in_backward`: activation checkpointing computes it once more."""

    def end_pass(self, *, failed: bool) -> None: ...

    def enter(self, module: nn.Module) -> Any:
        """A module starts; what is returned is given to `leave`."""

    def leave(self, lease: Any) -> None: ...


class PassHooks:
    """Tells a listener of the passes of one model, on one thread at a time: `turn` says which.

    A pass is the forward of an outermost module of the model, whichever that is. Forwards that torch.func transforms,
    or that torch.compile or torch.jit traces, go by unseen.
    """

    def __init__(self, model: nn.Module, listener: Listener) -> None:
        self._members = {id(module): module for module in model.modules()}
        self._root = model
        self._is_called_by_parts = False
        self._listener = listener
        self._stack: list[tuple[nn.Module, Any]] = []
        self.turn = Turn()
        self._turn_before: Holder | None = None
        self._thread = 0
        self._frame: FrameType | None = None  # of the outermost module's call
        self._handles: list[Any] = []

    @property
    def is_installed(self) -> bool:
        return bool(self._handles)

    @property
    def sees_passes(self) -> bool:
        """Whether every pass is seen; else at most that gradients come to be wanted is."""
        return len(self._handles) > 1

    @property
    def is_inside(self) -> bool:
        """Whether this thread is inside a pass now."""
        return bool(self._stack) and self._thread == threading.get_ident() and not _is_over(self._frame)

    @property
    def is_computing(self) -> bool:
        """Whether this thread is inside a pass, or computes the backward that a pass waits for."""
        return self.is_inside or (bool(self._stack) and not _is_over(self._frame) and waits_for_this(self._thread))

    @property
    def current(self) -> nn.Module | None:
        """The innermost module of the pass."""
        return self._stack[-1][0] if self._stack else None

    @property
    def entered(self) -> list[nn.Module]:
        """The modules of the pass that are under way, outermost first."""
        return [module for module, _ in self._stack]

    def install(self) -> None:
        if not self._handles:
            self._handles = [
                register_module_forward_pre_hook(self._before),
                register_module_forward_hook(self._after, always_call=True),
            ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def watch(self) -> None:
        """Instead of seeing every module, wait for a forward of the whole model with gradients on, then `install`.

        A model whose parts have been called by themselves stays seen: its whole may never be called.
        """
        if not self._is_called_by_parts:
            self.remove()
            self._handles = [self._root.register_forward_pre_hook(_Watch(self))]

    def start(self, frame: FrameType) -> None:
        """Install, with the forward of the whole model under way: it ends with this frame."""
        self.install()
        with unseen():
            self._begin(self._root, frame)

    def _before(self, module: nn.Module, args: Any) -> None:
        if not _is_transformed():  # first: torch.compile traces this line, and nothing after it
            with unseen():
                self._begin(module, _call_of(sys._getframe(1)))

    def _begin(self, module: nn.Module, frame: FrameType) -> None:
        if self._members.get(id(module)) is not module:
            return
        me = threading.get_ident()
        is_outermost = not self.is_computing
        if is_outermost:
            if torch._C._current_graph_task_id() != -1:
                self._listener.begin_backward()  # its turn outlasts that of the pass
            before = self.turn.take(partial(_is_over, frame))
            self._stack.clear()  # of a pass that never ended; the listener finds that out by itself
            self._thread, self._frame, self._turn_before = me, frame, before
            self._is_called_by_parts |= module is not self._root
        self.turn.progress += 1
        try:
            if is_outermost:
                self._listener.begin_pass(in_backward=torch._C._current_graph_task_id() != -1)
            self._stack.append((module, self._listener.enter(module)))
        except BaseException:
            if is_outermost:
                self._end(failed=True)
            raise

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if _is_transformed() or not self.is_computing:
            return
        if not any(entered is module for entered, _ in self._stack):
            return
        with unseen():
            self._leave(module, failed=output is None)

    def _leave(self, module: nn.Module, *, failed: bool) -> None:
        self.turn.progress += 1
        try:
            while True:
                entered, lease = self._stack.pop()
                self._listener.leave(lease)
                if entered is module:  # what it called and caught an interrupt of has ended with it
                    break
        finally:
            if not self._stack:
                self._end(failed=failed)

    def _end(self, *, failed: bool) -> None:
        try:
            self._listener.end_pass(failed=failed)
        finally:
            self._frame = None
            self.turn.give(self._turn_before)


class _Watch:
    """The one hook that sits on the model, while there is nothing else to see. A copy or a pickle of it does
    nothing."""

    def __init__(self, hooks: PassHooks) -> None:
        self._hooks = hooks

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not _is_transformed() and torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            self._hooks.remove()
            self._hooks.start(_call_of(sys._getframe(1)))

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")  # takes anything, does nothing, and needs no hetero to be loaded


def _call_of(frame: FrameType) -> FrameType:
    """The frame that lasts until the hooks of a module's forward have run: torch runs the forward in one of its own,
    and calls hooks after an error when that has ended."""
    return frame.f_back if frame.f_code.co_name == "inner" and frame.f_back is not None else frame


def _is_over(frame: FrameType | None) -> bool:
    """Whether a call has ended, told or untold: torch calls no hook for a KeyboardInterrupt."""
    if frame is None:
        return True
    try:
        frame.clear()
    except RuntimeError:  # it is executing
        return False
    return True


def _is_transformed() -> bool:
    """Whether torch.compile, torch.export, torch.func or torch.jit.trace looks at this forward."""
    return (
        torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    )
