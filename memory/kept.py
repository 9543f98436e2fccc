"""Views of leased weights that somebody keeps: each pass begins with today's values in them.

Note [kept views]
    A module may keep a view of its weight from one forward to the next (`self._wt = self.weight.t()`). Plainly that is
    the weight; here it is a slot that the chunk has left, kept from reuse by the view. So when a pass or a backward
    begins, such slots are filled again from their chunks' homes (a write through `.data` shows nowhere). Nothing else
    writes to such a slot: it is not given out before the view dies, and nothing is read ahead between passes. The copy
    is an operation of the compute queue, so whatever computed with the view before comes first, and all else after.
    Between passes a kept view shows the values of the last one. What is written through it stays in the slot, and is
    lost when the slot is filled again.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hetero.memory.executor import Executor
from hetero.memory.residency import alias, nothing
from hetero.memory.weights import WeightChunk


class KeptViews:
    """Knows the slots that tensors outside look at, those of closed executors included, whose memory it holds until
    the last such tensor has died. Use it between passes only; one thread at a time."""

    def __init__(self, chunks: Mapping[int, WeightChunk], torch_device: torch.device) -> None:
        self._chunks, self._torch_device = chunks, torch_device
        self._executors: list[tuple[Executor, tuple[object, ...]]] = []

    def follow(self, executor: Executor) -> None:
        """See an executor's slots, from now until nobody looks at any, also after it is closed."""
        self._executors.append((executor, executor.keepers))

    def forget(self) -> None:
        """See no more of them: the wrap has ended."""
        self._executors.clear()

    @property
    def has_any(self) -> bool:
        return any(executor.outlived() for executor, _ in self._executors)

    def refresh(self) -> None:
        """Bring the values of today into every kept view."""
        self._executors = [(e, keepers) for e, keepers in self._executors if not e.is_closed or e.outlived()]
        for executor, _ in self._executors:
            for entry in executor.outlived():
                refill(self._chunks[entry.chunk.chunk_id], entry.space.address, self._torch_device)


def refill(chunk: WeightChunk, address: int, torch_device: torch.device) -> None:
    """Copy the home's bytes of today into the slot or the copy at `address`."""
    with torch.no_grad(), torch.inference_mode(False):
        alias(address + chunk.residue, chunk.nbytes, torch_device, nothing).copy_(chunk.base)
