"""One thread at a time: a pass of a model, or a backward through one. Others wait."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from time import monotonic, sleep

import torch
from torch.autograd.graph import _engine_run_backward

from hetero.io.errors import HeteroError

PATIENCE_S = 60.0
"""So long a thread waits for one that does not go on."""
POLL_S = 0.0005

_start_backward = _engine_run_backward.__code__

Holder = tuple[int, Callable[[], bool]]
"""A thread, and whether what it does is over: an interrupted pass, or a backward that raised, tells nobody."""


class Turn:
    """Who may lease. What a thread does inside its own turn (a backward in a forward, a recomputation in a backward)
    is a part of it.
    """

    def __init__(self) -> None:
        self.progress = 0  # whoever has the turn raises it
        self._lock = threading.Lock()
        self._holder: Holder | None = None

    @property
    def is_taken(self) -> bool:
        holder = self._holder
        return holder is not None and not holder[1]()

    def is_free(self, patience_s: float) -> bool:
        """Whether nobody has it, or will not in a moment: when a backward raises on a thread of torch's, its caller
        goes on before that thread lets go."""
        end_s = monotonic() + patience_s
        while self.is_taken and self._holder is not None and self._holder[0] != threading.get_ident():
            if monotonic() > end_s:
                break
            sleep(POLL_S)
        return not self.is_taken

    def take(self, is_over: Callable[[], bool]) -> Holder | None:
        """Wait for the turn. What is returned is for `give`. Raises HeteroError when whoever has it does not go on."""
        me = threading.get_ident()
        seen, since_s = -1, 0.0
        while True:
            with self._lock:
                before = self._holder
                if before is None or before[0] == me or before[1]() or waits_for_this(before[0]):
                    self._holder = me, is_over
                    return before if before is not None and not before[1]() else None
            if self.progress != seen:
                seen, since_s = self.progress, monotonic()
            elif monotonic() - since_s > PATIENCE_S:
                raise HeteroError(
                    "another thread is in a forward or a backward of this model, and has not gone on for "
                    f"{PATIENCE_S:g} s. Threads use a wrapped model in turns: no forward may wait for another thread's"
                )
            sleep(POLL_S)

    def give(self, before: Holder | None) -> None:
        with self._lock:
            self._holder = before


def waits_for_this(thread: int) -> bool:
    """Whether this is a thread of torch's that runs a backward, and `thread` waits for one that it has started: on a
    GPU they are the same backward."""
    frame = sys._current_frames().get(thread)
    if frame is None or frame.f_code is not _start_backward or torch._C._current_graph_task_id() == -1:
        return False
    me = threading.get_ident()
    started = (known for known in threading.enumerate() if not isinstance(known, threading._DummyThread))
    return all(known.ident != me for known in started)  # those that Python started run their own
