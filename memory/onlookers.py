"""Who looks at the homes of weight chunks beside the model itself.

Note [counting]
    Torch counts the tensors on a storage and does not say which they are. So the model's own are counted here, and what
    torch counts beyond them is a stranger's: a kept state_dict, `p.detach()`, a numpy array, a slice. A storage can
    hold several chunks and small tensors of the model (a flat buffer); then a stranger pins them all, because nobody
    can say which part it looks at.
    The two counts have to agree between passes. In a pass a tensor that torch itself holds counts as a stranger's as
    long as it lives, which is right: the memory would not be free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hetero.memory.weights import WeightChunk, num_holders


class Onlookers:
    """Tells which homes tensors outside the model look at. `others` are the model's tensors that are in no chunk."""

    def __init__(self, chunks: Sequence[WeightChunk], others: Iterable[Tensor]) -> None:
        self._chunks = list(chunks)
        storages = Counter(_storage_of(chunk.base) for chunk in chunks)
        groups: dict[int, list[WeightChunk]] = {}
        for chunk in chunks:  # a home that has moved is alone on its storage, so later none join
            if storages[_storage_of(chunk.base)] > 1:
                groups.setdefault(_storage_of(chunk.base), []).append(chunk)
        self._groups = {chunk.chunk_id: group for group in groups.values() for chunk in group}
        plain = [tensor for tensor in others if tensor.layout is torch.strided and type(tensor.data) is Tensor]
        self._others = [tensor for tensor in plain if _storage_of(tensor) in storages]

    def is_watched(self, chunk: WeightChunk) -> bool:
        """Whether tensors outside the model look at the storage of the chunk's home."""
        storage = _storage_of(chunk.base)
        together = self._groups.get(chunk.chunk_id, [chunk])
        own = sum(c.num_own_holders for c in together if c is chunk or _storage_of(c.base) == storage)
        own += sum(_storage_of(tensor) == storage for tensor in self._others)
        return num_holders(chunk.base) > own


def _storage_of(tensor: Tensor) -> int:
    """What tells a storage from all others that live."""
    return int(tensor.untyped_storage()._cdata)
