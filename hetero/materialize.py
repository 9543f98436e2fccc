"""From a chunk's bytes to the tensor a module computes with: a view where possible, else numbers in scratch memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hetero.cpu_kernels.dequantize import dequantize_rows, dequantize_scratch_nbytes
from hetero.cpu_kernels.formats import format_for
from hetero.io.arena import round_up
from hetero.layout import ADDRESS_ALIGNMENT_NBYTES, Weight
from hetero.memory.chunk import PlacedPart
from hetero.sources import ParamSource

WORK_NBYTES = 256 << 10
"""Temporaries of one dequantisation: larger runs are no faster, and this much stays in the L2 cache."""


@dataclass(frozen=True, slots=True)
class Need:
    """Scratch bytes of one weight at use."""

    numbers_nbytes: int
    work_nbytes: int


def scratch_need(weight: Weight, num_rows: int | None = None) -> Need:
    """What `materialize` takes of the scratch for `num_rows` of the parameter's rows (None: all of it)."""
    if weight.is_plain:
        return Need(0, 0)
    source = weight.source
    numel = source.nbytes // weight.row_nbytes * weight.num_cols
    rows = numel // weight.num_cols if num_rows is None else num_rows
    numbers = round_up(rows * weight.num_cols * weight.dtype.itemsize, ADDRESS_ALIGNMENT_NBYTES)
    work = dequantize_scratch_nbytes(source.format, rows, weight.num_cols, weight.dtype, scratch_nbytes=WORK_NBYTES)
    if source.row_permutation is not None:
        work += round_up(rows * weight.row_nbytes, ADDRESS_ALIGNMENT_NBYTES)
    if source.transform != "none":
        numbers *= 2
    return Need(numbers, round_up(work, ADDRESS_ALIGNMENT_NBYTES))


class Scratch:
    """Memory for the numbers of one module's packed weights at a time, reused by the next module.

    On a GPU the reuse is ordered by the compute stream, on which everything here runs.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = round_up(nbytes, ADDRESS_ALIGNMENT_NBYTES)
        base = torch.empty(self.nbytes + ADDRESS_ALIGNMENT_NBYTES, dtype=torch.uint8, device=device)
        self._bytes = base[-base.data_ptr() % ADDRESS_ALIGNMENT_NBYTES :][: self.nbytes]
        self._used = 0

    def reset(self) -> None:
        self._used = 0

    def take(self, nbytes: int) -> Tensor:
        start, self._used = self._used, self._used + round_up(nbytes, ADDRESS_ALIGNMENT_NBYTES)
        assert self._used <= self.nbytes, f"scratch of {self.nbytes} bytes is short of {self._used}"
        return self._bytes[start : start + nbytes]


def materialize(weight: Weight, chunk_bytes: Tensor, placed: PlacedPart, scratch: Scratch) -> Tensor:
    """The part as the module's tensor: (its rows, ...) in the compute dtype.

    A plain weight is a view of `chunk_bytes` (uint8, the whole slot); any other is computed into `scratch`.
    """
    part = placed.part
    packed = chunk_bytes[placed.slot_offset : placed.slot_offset + part.nbytes]
    source = weight.source
    if weight.is_plain:
        return packed.view(weight.dtype).view(shape_of(source, part.num_rows))
    num_rows = part.nbytes // weight.row_nbytes
    numbers = scratch.take(num_rows * weight.num_cols * weight.dtype.itemsize)
    out = numbers.view(weight.dtype).view(num_rows, weight.num_cols)
    if source.row_permutation is not None:
        packed = _unrotate(packed, source.row_permutation, weight.row_nbytes, scratch)
    work_nbytes = dequantize_scratch_nbytes(
        source.format, num_rows, weight.num_cols, weight.dtype, scratch_nbytes=WORK_NBYTES
    )
    dequantize_rows(packed, source.format, weight.num_cols, out, scratch=scratch.take(work_nbytes))
    if source.transform == "transpose":
        turned = scratch.take(out.nbytes).view(weight.dtype).view(weight.num_cols, num_rows)
        out = turned.copy_(out.t())
    elif source.transform == "minus_one":
        out -= 1
    return out.view(shape_of(source, part.num_rows))


def shape_of(source: ParamSource, num_rows: int | None) -> tuple[int, ...]:
    return source.shape if num_rows is None else (num_rows, *source.shape[1:])


def _unrotate(packed: Tensor, permutation: tuple[int, int], row_nbytes: int, scratch: Scratch) -> Tensor:
    """Put rows from llama.cpp's pairwise rope order into the model's: whole rows move, no number changes."""
    num_heads, head_dim = permutation
    ordered = scratch.take(packed.numel())
    pairs = packed.view(num_heads, head_dim // 2, 2, row_nbytes)
    ordered.view(num_heads, 2, head_dim // 2, row_nbytes).copy_(pairs.transpose(1, 2))
    return ordered


def small_tensor(source: ParamSource, raw: Tensor, dtype: torch.dtype) -> Tensor:
    """A parameter that stays resident, from its file bytes (uint8, contiguous). Plain numbers stay where they are.

    Floating point parameters take the compute dtype; buffers keep their own.
    """
    known = format_for(source.format)
    if known.torch_dtype is not None:
        numbers = raw.view(known.torch_dtype)
        if source.transform == "minus_one":
            numbers = numbers.float() - 1
        elif source.transform == "transpose":
            numbers = numbers.view(source.shape[::-1]).t().contiguous()
        if source.kind == "parameter" and numbers.is_floating_point():
            numbers = numbers.to(dtype)
        out = numbers.view(source.shape)
    else:
        cols = source.pieces[0].tensor.shape[-1]
        out = torch.empty(raw.numel() // known.block_nbytes * known.block_numel // cols, cols, dtype=dtype)
        dequantize_rows(raw, source.format, cols, out)
        if source.transform == "transpose":
            out = out.t().contiguous()
        elif source.transform == "minus_one":
            out -= 1
        out = out.view(source.shape)
    if source.row_permutation is not None and out.dim() > 0:
        heads, head_dim = source.row_permutation
        pairs = out.view(heads, head_dim // 2, 2, *out.shape[1:])
        out = pairs.transpose(1, 2).reshape(source.shape)
    return out
