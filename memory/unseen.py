"""Keeping what hetero computes for itself from the modes of others: a selective checkpoint that counts operations, a
profiler, our own `OutsideReads`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes


def unseen() -> AbstractContextManager[None]:
    """No torch function and no operator inside reaches a mode, nor a tensor subclass's `__torch_function__`."""
    return _unseen_by_all() if torch._C._len_torch_dispatch_stack() else torch._C.DisableTorchFunction()


@contextmanager
def _unseen_by_all() -> Iterator[None]:
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield
