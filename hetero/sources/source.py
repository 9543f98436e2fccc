"""What a model source says: a skeleton to build, and for every parameter where its bytes lie."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from hetero.io.checkpoint import CheckpointIndex, TensorInfo
from hetero.io.tensor_info import HeaderFile

Kind = Literal["parameter", "buffer"]
Transform = Literal["none", "minus_one", "transpose"]


@dataclass(frozen=True, slots=True)
class Piece:
    """One extent of the checkpoint and where it goes in a parameter."""

    tensor: TensorInfo
    """The extent; a part of a stacked tensor of the file has its own offset, nbytes and shape here."""
    dst_offset: int
    """Bytes, in the parameter's contiguous layout *in the file's format*."""


@dataclass(frozen=True, slots=True)
class ParamSource:
    """Where the bytes of one parameter or persistent buffer lie, and what they still need after being read.

    `pieces` cover the parameter exactly once, in order of `dst_offset`. They hold numbers of `format`; the model may
    want another dtype (a plain `.to(dtype)`, after the transform). With

    - `row_permutation = (num_heads, head_dim)`: parameter row `h*head_dim + half*(head_dim//2) + i` is file row
      `h*head_dim + 2*i + half` (llama.cpp stores rotary rows pairwise). Rows are whole in every format, so packed rows,
      or the outputs computed from them, can be permuted instead of numbers.
    - `transform = "minus_one"`: subtract 1 in float32. `"transpose"`: the file holds the transpose of `shape`.
    """

    names: tuple[str, ...]
    """All names that share it, the canonical one (first registered) first."""
    kind: Kind
    shape: tuple[int, ...]
    """The parameter's own shape, as the model has it."""
    format: str
    pieces: tuple[Piece, ...]
    row_permutation: tuple[int, int] | None = None
    transform: Transform = "none"

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def nbytes(self) -> int:
        """Bytes in the file's format."""
        return sum(piece.tensor.nbytes for piece in self.pieces)


@dataclass(slots=True)
class Source:
    """A model that could be built, opened from headers only. Holds no weights and no open file."""

    path: Path
    config: Any
    """A transformers config of its own; every built model gets a further copy, so that none switches another's."""
    index: CheckpointIndex
    dtype: torch.dtype
    """What the model computes in. "auto" is what transformers' from_pretrained would choose."""
    params: list[ParamSource]
    """Every parameter once, and the persistent buffers the file holds, in module registration order."""
    eos_token_ids: tuple[int, ...]
    fingerprint: str
    """Changes when a file of the checkpoint is replaced or modified, or its header differs."""
    _build: Callable[[], nn.Module]
    _load_tokenizer: Callable[[], Any]
    _built: nn.Module | None = field(default=None, repr=False)

    def build_model(self) -> nn.Module:
        """Return a new model in eval mode: parameters on meta and tied, buffers real on the CPU.

        Persistent buffers listed in `params` hold their initial values until the caller writes the file's.
        """
        model, self._built = self._built, None  # the one made to resolve the names serves the first call
        return self._build() if model is None else model

    def load_tokenizer(self) -> Any:
        """Return the transformers tokenizer of this model. Raises ConfigError if the source has none."""
        return self._load_tokenizer()


def fingerprint_of(index: CheckpointIndex, config: Any) -> str:
    """Hash the files' identities, their header bytes and the config. Blocks on reading the headers."""
    digest = hashlib.sha256()
    digest.update(config.to_json_string().encode())
    data_offsets: dict[Path, int] = {}
    for tensor in index.tensors.values():
        data_offsets[tensor.path] = min(tensor.offset, data_offsets.get(tensor.path, tensor.offset))
    for path, identity in sorted(index.files.items()):
        digest.update(f"{path.name}\0{identity}\0".encode())
        with HeaderFile(path) as file:
            digest.update(file.read(0, data_offsets.get(path, identity.nbytes)))
    return digest.hexdigest()


def eos_ids(generation_config: Any, extra: Iterable[int | None] = ()) -> tuple[int, ...]:
    """The ids that end a text: those of the generation config, then the extra ones."""
    eos = getattr(generation_config, "eos_token_id", None)
    ids = eos if isinstance(eos, list) else [eos]
    return tuple(dict.fromkeys(i for i in [*ids, *extra] if i is not None))
