"""transformers' weight conversion mapping, carried out on extents instead of tensors.

A checkpoint name may differ from the parameter's (renamings), and a parameter may be made of several tensors of the
file (converters). Operations that only place bytes side by side keep extents; anything that computes or reorders inside
a tensor would need a second copy of the weights and is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetero.io.checkpoint import FORMAT_BLOCKS, TensorInfo
from hetero.io.errors import CheckpointError, UnsupportedError
from hetero.sources.source import Piece


@dataclass(frozen=True, slots=True)
class Extents:
    """A tensor put together from extents of one format: its shape, and its pieces in order."""

    shape: tuple[int, ...]
    format: str
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, tensor: TensorInfo) -> Extents:
        return cls(tensor.shape, tensor.format, (Piece(tensor, 0),))

    @property
    def nbytes(self) -> int:
        return sum(piece.tensor.nbytes for piece in self.pieces)


def stack(parts: Sequence[Extents]) -> Extents:
    """torch.stack(parts, dim=0). Raises ValueError when shapes or formats differ."""
    return concatenate([Extents((1, *part.shape), part.format, part.pieces) for part in parts], dim=0)


def concatenate(parts: Sequence[Extents], dim: int) -> Extents:
    """torch.cat(parts, dim), as long as no piece has to be cut. Raises ValueError otherwise."""
    first = parts[0]
    rank = len(first.shape)
    dim = dim % rank
    rest = [part.shape[:dim] + part.shape[dim + 1 :] for part in parts]
    if any(part.format != first.format for part in parts) or any(r != rest[0] for r in rest):
        raise ValueError(f"tensors of unlike shape or format: {[(p.shape, p.format) for p in parts]}")
    shape = (*first.shape[:dim], sum(part.shape[dim] for part in parts), *first.shape[dim + 1 :])
    num_runs = math.prod(shape[:dim])
    run_nbytes = [part.nbytes // num_runs for part in parts]  # of each part, per index of the outer dimensions
    starts = [sum(run_nbytes[:i]) for i in range(len(parts))]
    pieces = []
    for part, run, start in zip(parts, run_nbytes, starts, strict=True):
        for piece in part.pieces:
            outer, inner = divmod(piece.dst_offset, run)
            if inner + piece.tensor.nbytes > run:
                raise ValueError(f"a tensor of the file would have to be cut along dimension {dim}")
            pieces.append(Piece(piece.tensor, outer * sum(run_nbytes) + start + inner))
    return Extents(shape, first.format, tuple(sorted(pieces, key=lambda piece: piece.dst_offset)))


@dataclass(slots=True)
class _Gathered:
    """The file's tensors that make one parameter. `converter` is None for a plain (re)naming."""

    converter: Any | None
    by_pattern: dict[str, list[TensorInfo]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Resolved:
    """Model name -> extents, the names of the file that nothing wants, and the transforms that matched."""

    extents: dict[str, Extents]
    unused: list[str]
    used_transforms: list[Any]


def resolve(model: Any, tensors: Mapping[str, TensorInfo], path: Path) -> Resolved:
    """Find the extents of every entry of the model's state dict that the checkpoint has.

    Raises UnsupportedError for an operation that cannot be done on extents, CheckpointError for tensors that do not
    fit together.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    wanted = model.state_dict()
    prefix = model.base_model_prefix

    gathered: dict[str, _Gathered] = {}
    unused: list[str] = []
    # In this order a converter's list of experts is the list of their numbers.
    for key in sorted(tensors, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, wanted)
        if name not in wanted and key in wanted:
            name, pattern = rename_source_key(key, [], [], base_model_prefix=prefix, meta_state_dict=wanted)
        if name not in wanted:
            unused.append(key)
            continue
        converter = None if pattern is None else by_pattern[pattern]
        entry = gathered.setdefault(name, _Gathered(converter))
        entry.by_pattern.setdefault(pattern or key, []).append(tensors[key])

    extents: dict[str, Extents] = {}
    for name, entry in gathered.items():
        if entry.converter is None:
            extents[name] = Extents.of(next(iter(entry.by_pattern.values()))[0])
        else:
            extents[name] = _convert(name, entry.converter, entry.by_pattern, path)
    return Resolved(extents, unused, [t for t in transforms if t.was_used()])


def _convert(name: str, converter: Any, by_pattern: dict[str, list[TensorInfo]], path: Path) -> Extents:
    from transformers.core_model_loading import Concatenate, MergeModulelist

    parts = {pattern: [Extents.of(t) for t in found] for pattern, found in by_pattern.items()}
    counts = {pattern: len(parts.get(pattern, ())) for pattern in converter.source_patterns}
    if len(set(counts.values())) > 1:  # of each expert all its tensors, or the file is incomplete
        raise CheckpointError(path, f"lacks tensors for {name!r}; it has of each kind: {counts}")
    for operation in converter.operations:
        try:
            if type(operation) is MergeModulelist and operation.dim == 0:
                parts = {pattern: [stack(found)] for pattern, found in parts.items()}
            elif type(operation) is Concatenate:
                ordered = [part for pattern in converter.source_patterns for part in parts.get(pattern, [])]
                parts = {converter.source_patterns[0]: [concatenate(ordered, operation.dim)]}
            else:
                raise UnsupportedError(_refusal(name, operation))
        except ValueError as error:
            raise UnsupportedError(f"{_refusal(name, operation)} ({error})") from error
    results = [part for found in parts.values() for part in found]
    if len(results) != 1:
        raise UnsupportedError(_refusal(name, converter.operations[-1]))
    return results[0]


def _refusal(name: str, operation: Any) -> str:
    return (
        f"{name!r} is made from the checkpoint by {operation!r}, which cannot be done on byte ranges; "
        "load the model with transformers once and save it with save_pretrained(path, save_original_format=False)"
    )


def check_shape(name: str, found: Extents, wanted: tuple[int, ...], path: Path) -> None:
    """Raise CheckpointError if the checkpoint's tensor does not have the model's shape."""
    numel_per_block, block_nbytes = FORMAT_BLOCKS[found.format]
    if found.shape != wanted or found.nbytes * numel_per_block != math.prod(wanted) * block_nbytes:
        raise CheckpointError(
            path,
            f"{name!r} has shape {found.shape} in the file, the config makes it {wanted}; they do not belong together",
        )
