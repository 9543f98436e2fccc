"""From a source and a chunk size to chunks: which bytes travel together, and which module uses them when."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from hetero.cpu_kernels.formats import format_for, row_nbytes
from hetero.io.errors import UnsupportedError
from hetero.io.extent import Extent
from hetero.memory.chunk import Chunk, Part, build_chunk, group_parts, split_rows
from hetero.memory.plan_types import ChunkSpec, Moment, Trace
from hetero.sources import ParamSource, Source

SMALL_NBYTES = (4096, 1 << 20)
"""Limits of what always stays resident besides vectors: a 16384th of the model, within these bounds."""
ROW_READ_NBYTES = 8192
"""What one row of a lookup table costs the disk: two pages, if it straddles them."""
LEASE_S = 1e-4
"""What a moment costs beside its arithmetic (hooks, lease, a further call of a kernel): small chunks are not free."""
ADDRESS_ALIGNMENT_NBYTES = 64


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter that may stream, as the chunks hold it: whole in one chunk, or row blocks in several."""

    source: ParamSource
    chunk_ids: tuple[int, ...]
    first_rows: tuple[int, ...]
    dtype: torch.dtype
    """What the model computes in."""

    @property
    def is_split(self) -> bool:
        return len(self.chunk_ids) > 1

    @property
    def num_cols(self) -> int:
        """Columns of the file's rows."""
        return self.source.pieces[0].tensor.shape[-1]

    @property
    def row_nbytes(self) -> int:
        return row_nbytes(self.source.format, self.num_cols)

    @property
    def is_plain(self) -> bool:
        """The file's bytes are the parameter's bytes; nothing is to be done at use."""
        source = self.source
        return (
            format_for(source.format).torch_dtype == self.dtype
            and source.row_permutation is None
            and source.transform == "none"
            and all(piece.tensor.offset % self.dtype.itemsize == 0 for piece in source.pieces)
        )


@dataclass(slots=True)
class Layout:
    """Every parameter of a model: `small` stay resident for ever, `weights` live in `chunks`."""

    small: list[ParamSource]
    weights: dict[str, Weight]
    """By canonical parameter name, in order of first use."""
    chunks: list[Chunk]
    tables: dict[str, Weight]
    """Lookup tables that only embeddings read; a chunk each, read by rows while not resident."""
    moments: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)

    def specs(self) -> list[ChunkSpec]:
        tables = {chunk_id for weight in self.tables.values() for chunk_id in weight.chunk_ids}
        return [
            ChunkSpec(
                chunk_id=chunk.chunk_id,
                nbytes=chunk.nbytes,
                read_nbytes=chunk.read_nbytes,
                by_rows=chunk.chunk_id in tables,
                row_read_nbytes=ROW_READ_NBYTES if chunk.chunk_id in tables else 0,
            )
            for chunk in self.chunks
        ]

    def trace(self, phase: str, compute_s: dict[int, float]) -> Trace:
        """The order that module registration promises, with estimated seconds of compute per chunk."""
        moments = (Moment(name, ids, LEASE_S + sum(compute_s[i] for i in ids)) for name, ids in self.moments)
        return Trace(phase, tuple(moments))

    @property
    def weight_nbytes(self) -> int:
        return sum(weight.source.nbytes for weight in [*self.weights.values(), *self.tables.values()])


def build_layout(source: Source, model: nn.Module, chunk_nbytes: int) -> Layout:
    """Cut `source` into chunks of at most about `chunk_nbytes`; a parameter that must be whole may be larger."""
    small, large = _sort_out(source)
    file_nbytes = {path: identity.nbytes for path, identity in source.index.files.items()}
    splittable, embeddings = _uses(model)
    tables = [p for p in large if all(name in embeddings for name in p.names)]
    units: list[tuple[str, list[Part]]] = []
    previous = ""
    for param in _by_use(large, tables, embeddings):
        blocks = [_part_of(param)]
        is_as_in_file = blocks[0].is_zero_copy and param.row_permutation is None and param.transform == "none"
        if is_as_in_file and all(name in splittable or name in embeddings for name in param.names):
            rows = param.shape[0]
            blocks = split_rows(blocks[0], rows, blocks[0].nbytes // rows, chunk_nbytes)
        module = param.name.rpartition(".")[0]
        if len(blocks) == 1 and module == previous:
            units[-1][1].append(blocks[0])
        else:
            units += ((_layer_of(param.name), [block]) for block in blocks)
        previous = module
    chunks: list[Chunk] = []
    for group, members in group_parts(units, chunk_nbytes):
        chunks.append(build_chunk(len(chunks), group, members, file_nbytes))
    for param in tables:
        chunks.append(build_chunk(len(chunks), param.name, [_part_of(param)], file_nbytes))
    weights = _weights(large, chunks, source.dtype)
    layout = Layout(
        small=small,
        weights={name: weight for name, weight in weights.items() if all(weight.source is not t for t in tables)},
        chunks=chunks,
        tables={param.name: weights[param.name] for param in tables},
    )
    layout.moments = list(_moments(model, layout, embeddings))
    return layout


def _sort_out(source: Source) -> tuple[list[ParamSource], list[ParamSource]]:
    total_nbytes = sum(param.nbytes for param in source.params)
    limit = min(max(total_nbytes // 16384, SMALL_NBYTES[0]), SMALL_NBYTES[1])
    small: list[ParamSource] = []
    large: list[ParamSource] = []
    for param in source.params:
        is_small = param.kind == "buffer" or len(param.shape) <= 1 or param.nbytes <= limit
        (small if is_small else large).append(param)
    return small, large


def _uses(model: nn.Module) -> tuple[set[str], set[str]]:
    """Names of weights whose rows can be computed in blocks, and of weights that embeddings look up."""
    splittable, embeddings = set(), set()
    for path, module in model.named_modules():
        name = f"{path}.weight" if path else "weight"
        if isinstance(module, nn.Embedding):
            embeddings.add(name)
        elif type(module) is nn.Linear and module._parameters["bias"] is None:
            # With a bias torch's blocked result was seen to differ in bf16; without one it never did.
            splittable.add(name)
    return splittable, embeddings


def _by_use(large: list[ParamSource], tables: list[ParamSource], embeddings: set[str]) -> list[ParamSource]:
    """Order of first use as a whole: a tied table is used where its other owner is, at the end."""
    tied = [p for p in large if p not in tables and p.name in embeddings]
    return [p for p in large if p not in tables and p not in tied] + tied


def _part_of(param: ParamSource) -> Part:
    pieces = tuple(
        (Extent(piece.tensor.path, piece.tensor.offset, piece.tensor.nbytes), piece.dst_offset)
        for piece in param.pieces
    )
    return Part(param.name, param.nbytes, pieces)


def _layer_of(name: str) -> str:
    """The path up to its first number: `model.layers.3.mlp.up_proj.weight` -> `model.layers.3`."""
    path = name.split(".")[:-1]
    for depth, step in enumerate(path, 1):
        if step.isdigit():
            return ".".join(path[:depth])
    return ".".join(path) or name


def _weights(large: list[ParamSource], chunks: list[Chunk], dtype: torch.dtype) -> dict[str, Weight]:
    places: dict[str, list[tuple[int, int]]] = {}
    for chunk in chunks:
        for placed in chunk.parts:
            places.setdefault(placed.part.name, []).append((placed.part.first_row, chunk.chunk_id))
    weights = {}
    for param in large:
        if not (dtype.is_floating_point and _is_float(param.format)):
            raise UnsupportedError(
                f"parameter {param.name} is stored as {param.format}, which cannot be computed in {dtype}; use a "
                "checkpoint in F32, F16, BF16 or a GGUF quantisation"
            )
        rows = sorted(places[param.name])
        weights[param.name] = Weight(param, tuple(i for _, i in rows), tuple(row for row, _ in rows), dtype)
    return weights


def _is_float(name: str) -> bool:
    dtype = format_for(name).torch_dtype
    return dtype is None or dtype.is_floating_point


def _moments(model: nn.Module, layout: Layout, embeddings: set[str]) -> Iterator[tuple[str, tuple[int, ...]]]:
    canonical = {name: w.source.name for w in layout.weights.values() for name in w.source.names}
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            table = layout.tables.get(f"{path}.weight")
            if table is not None:
                yield path, table.chunk_ids
            continue
        names = [f"{path}.{name}" if path else name for name in module._parameters]
        weights = [layout.weights[canonical[name]] for name in names if name in canonical]
        if not weights:
            continue
        if any(weight.is_split for weight in weights):
            for chunk_id in weights[0].chunk_ids:
                yield path, (chunk_id,)
        else:
            yield path, tuple(dict.fromkeys(i for weight in weights for i in weight.chunk_ids))


def files_of(layout: Layout) -> set[Path]:
    """The files that hold any byte of the layout."""
    paths = {segment.path for chunk in layout.chunks for segment in chunk.segments}
    return paths | {piece.tensor.path for param in layout.small for piece in param.pieces}
