"""Packed weights to floating point, a run of blocks at a time, into memory the caller owns.

Note [Equal bits]
The reference is `gguf.quants.dequantize`: every number is `code * scale` or `code * scale + bias`, each operation
rounded to float32 on its own. So the product and the sum are separate passes here: torch.addcmul may be contracted
into a fused multiply-add on some CPUs, and that is another number. Rounding to bfloat16 or float16 comes last, once.
NaNs come out where the reference has them, with payload bits that neither promises.

Note [Passes]
Blocks are short (32 numbers), and torch walks a strided operand in inner loops that short. So bytes are first gathered
into contiguous scratch, nibbles are split eight at a time in 64-bit words, and the two passes that touch every number
in float32 run on contiguous memory. This is three times as fast as the same expression written on strided views.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hetero.cpu_kernels.formats import Format, format_for, row_nbytes

DEFAULT_SCRATCH_NBYTES = 1 << 20
_ALIGNMENT = 64
_EVERY_BYTE = 0x0101_0101_0101_0101
_LOW_NIBBLES = _EVERY_BYTE * 0x0F
_OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class _Packing:
    """How a packed format is taken apart. A group is a run of numbers that share scale and bias."""

    unpack: Callable[[Tensor, _Work], None]
    num_groups: int
    has_bias: bool
    codes_dtype: torch.dtype
    spare_nbytes: int
    """Bytes per block that `unpack` wants for itself."""

    def work_nbytes(self, block: Format, *, staged_out: bool) -> int:
        """Scratch bytes per block, with room for a copy of the block in case its address is not aligned."""
        floats = self.num_groups * (1 + self.has_bias) + (block.block_numel if staged_out else 0)
        return block.block_nbytes + block.block_numel + self.spare_nbytes + 4 * floats


@dataclass(slots=True)
class _Work:
    """Scratch for `num_blocks` blocks: contiguous views of one buffer, each 64-byte aligned."""

    blocks: Tensor  # (num_blocks, block_nbytes) uint8: the aligned copy, if one is needed
    codes: Tensor  # (num_blocks, block_numel) uint8
    spare: Tensor  # (num_blocks * spare_nbytes,) uint8
    scale: Tensor  # (num_blocks, num_groups) float32
    bias: Tensor | None  # as scale
    numbers: Tensor | None  # (num_blocks, block_numel) float32: the result before it is rounded to another dtype

    @classmethod
    def carve(cls, scratch: Tensor, num_blocks: int, block: Format, packing: _Packing, staged_out: bool) -> _Work:
        position = 0

        def take(per_block: int, dtype: torch.dtype) -> Tensor:
            nonlocal position
            nbytes = num_blocks * per_block * dtype.itemsize
            view = scratch[position : position + nbytes].view(dtype).view(num_blocks, per_block)
            position += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
            return view

        return cls(
            blocks=take(block.block_nbytes, torch.uint8),
            codes=take(block.block_numel, torch.uint8),
            spare=take(packing.spare_nbytes, torch.uint8).view(-1),
            scale=take(packing.num_groups, torch.float32),
            bias=take(packing.num_groups, torch.float32) if packing.has_bias else None,
            numbers=take(block.block_numel, torch.float32) if staged_out else None,
        )

    def temporary(self, position: int, per_block: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """(num_blocks, per_block) of the spare bytes, from `position` bytes per block on."""
        num_blocks = len(self.codes)
        view = self.spare[num_blocks * position : num_blocks * (position + per_block * dtype.itemsize)]
        return view.view(dtype).view(num_blocks, per_block)


_NUM_WORK_VIEWS = 6  # each may lose up to one alignment


def dequantize_rows(
    packed: Tensor,
    format: str,  # noqa: A002 (the word everywhere else)
    num_cols: int,
    out: Tensor,
    *,
    scratch: Tensor | None = None,
    scratch_nbytes: int = DEFAULT_SCRATCH_NBYTES,
) -> None:
    """Write the numbers of `packed` to `out`, equal to `gguf.quants.dequantize(...)` and then `.to(out.dtype)`.

    packed: (num_rows * row_nbytes,) or (num_rows, row_nbytes) uint8, contiguous, at any address; not written.
    out: (num_rows, num_cols) float32, bfloat16 or float16, contiguous, not overlapping `packed`; the caller's.
    scratch: contiguous uint8 whose address is a multiple of 64, with at least `dequantize_scratch_nbytes(...)` bytes
        for the smallest limit one would accept; overwritten. With it nothing is allocated; a bigger one means fewer,
        longer runs. Without it, at most `scratch_nbytes` (but one block's worth) are allocated for the call.

    Raises ValueError for a format that is not known or cannot be dequantised here, and for sizes that do not fit.
    """
    block = _block_for(format)
    _check(packed, block, num_cols, out)
    if out.numel() == 0:
        return
    if scratch is None:
        nbytes = dequantize_scratch_nbytes(format, out.shape[0], num_cols, out.dtype, scratch_nbytes=scratch_nbytes)
        scratch = torch.empty(nbytes + _ALIGNMENT, dtype=torch.uint8, device=packed.device)
        scratch = scratch[-scratch.data_ptr() % _ALIGNMENT :][:nbytes]
    elif scratch.data_ptr() % _ALIGNMENT or scratch.storage_offset() % 8 or not scratch.is_contiguous():
        raise ValueError(f"scratch must be contiguous at a multiple of {_ALIGNMENT}, got address {scratch.data_ptr()}")
    blocks = packed.reshape(-1, block.block_nbytes)
    if block.torch_dtype is not None:
        _convert(blocks, block.torch_dtype, out, scratch)
    else:
        _dequantize(blocks, block, out, scratch)


def dequantize_scratch_nbytes(
    format: str,  # noqa: A002
    num_rows: int,
    num_cols: int,
    out_dtype: torch.dtype,
    *,
    scratch_nbytes: int = DEFAULT_SCRATCH_NBYTES,
) -> int:
    """Upper bound of the temporary bytes of one `dequantize_rows`: `scratch_nbytes`, less if the tensor needs less.

    Never below what one block needs (at most 2.4 KB).
    """
    block = _block_for(format)
    num_blocks = num_rows * row_nbytes(format, num_cols) // block.block_nbytes
    per_block, fixed = _work_nbytes(block, out_dtype)
    return max(fixed + per_block, min(scratch_nbytes, fixed + per_block * num_blocks))


def _block_for(name: str) -> Format:
    block = format_for(name)
    if name not in DEQUANTIZABLE:
        raise ValueError(f"{name} cannot be dequantised; these can: {', '.join(DEQUANTIZABLE)}")
    return block


def _work_nbytes(block: Format, out_dtype: torch.dtype) -> tuple[int, int]:
    """Scratch bytes per block, and what the alignment of the views may cost in all."""
    if block.torch_dtype is not None:
        return block.block_nbytes, 0
    packing = _PACKINGS[block.name]
    return packing.work_nbytes(block, staged_out=out_dtype != torch.float32), _NUM_WORK_VIEWS * _ALIGNMENT


def _check(packed: Tensor, block: Format, num_cols: int, out: Tensor) -> None:
    if out.dtype not in _OUT_DTYPES or out.dim() != 2 or out.shape[1] != num_cols or not out.is_contiguous():
        raise ValueError(
            f"out must be contiguous (num_rows, {num_cols}) float32, bfloat16 or float16, "
            f"got {tuple(out.shape)} {out.dtype} with strides {out.stride()}"
        )
    expected = out.shape[0] * row_nbytes(block.name, num_cols)
    if packed.dtype != torch.uint8 or packed.numel() != expected or not packed.is_contiguous():
        raise ValueError(
            f"packed must be {expected} contiguous bytes of {block.name} for {tuple(out.shape)}, "
            f"got {tuple(packed.shape)} {packed.dtype} with strides {packed.stride()}"
        )


def _is_aligned(tensor: Tensor, nbytes: int) -> bool:
    return tensor.data_ptr() % nbytes == 0 and tensor.storage_offset() % nbytes == 0


def _convert(numbers: Tensor, dtype: torch.dtype, out: Tensor, scratch: Tensor) -> None:
    """Plain formats: one conversion, which torch rounds as the reference's two do, since the first is exact."""
    flat, result = numbers.reshape(-1), out.view(-1)
    if dtype == out.dtype:
        result.view(torch.uint8).copy_(flat)
    elif _is_aligned(flat, dtype.itemsize):
        result.copy_(flat.view(dtype))
    else:
        step = _run_length(scratch, dtype.itemsize, 0)
        for start in range(0, len(result), step):
            run = flat[start * dtype.itemsize : (start + step) * dtype.itemsize]
            result[start : start + step].copy_(scratch[: len(run)].copy_(run).view(dtype))


def _run_length(scratch: Tensor, per_block: int, fixed: int) -> int:
    num_blocks = (scratch.numel() - fixed) // per_block
    if num_blocks < 1:
        raise ValueError(f"scratch has {scratch.numel()} bytes, at least {fixed + per_block} are needed")
    return num_blocks


def _dequantize(blocks: Tensor, block: Format, out: Tensor, scratch: Tensor) -> None:
    packing = _PACKINGS[block.name]
    staged_out = out.dtype != torch.float32
    aligned = _is_aligned(blocks, 4)
    per_block, fixed = _work_nbytes(block, out.dtype)
    step = _run_length(scratch, per_block, fixed)
    results = out.view(-1, block.block_numel)
    work: _Work | None = None
    for start in range(0, len(blocks), step):
        run, result = blocks[start : start + step], results[start : start + step]
        if work is None or len(run) != len(work.codes):
            work = _Work.carve(scratch, len(run), block, packing, staged_out)
        packing.unpack(run if aligned else work.blocks.copy_(run), work)
        numbers = result if work.numbers is None else work.numbers
        # See Note [Equal bits]: convert, multiply, add, round are passes of their own.
        numbers.copy_(work.codes.view(packing.codes_dtype))
        grouped = numbers.view(len(run), packing.num_groups, -1)
        grouped.mul_(work.scale.unsqueeze(2))
        if work.bias is not None:
            grouped.add_(work.bias.unsqueeze(2))
        if work.numbers is not None:
            result.copy_(numbers)


def _load_float16(target: Tensor, blocks: Tensor, offset: int) -> None:
    """target: (num_blocks,) float32, from the float16 at byte `offset` of each block."""
    target.copy_(blocks.view(torch.float16)[:, offset // 2])


def _split_nibbles(nibbles: Tensor, work: _Work) -> None:
    """16 bytes per block: low nibbles are numbers 0-15, high ones 16-31. Takes 16 spare bytes."""
    words = work.temporary(0, 16).copy_(nibbles).view(torch.int64)
    codes = work.codes.view(torch.int64)
    for column in range(2):
        torch.bitwise_and(words[:, column], _LOW_NIBBLES, out=codes[:, column])
    words.bitwise_right_shift_(4)
    for column in range(2):
        torch.bitwise_and(words[:, column], _LOW_NIBBLES, out=codes[:, 2 + column])


def _add_fifth_bits(bits: Tensor, work: _Work) -> None:
    """4 bytes per block: bit i is bit 4 of number i. Takes 32 spare bytes.

    A byte times 0x01..01 is that byte eight times; the mask leaves bit j in byte j; adding 0x7f carries whatever bit is
    left into bit 7 of its own byte, and from there it is moved to bit 4.
    """
    words = work.temporary(0, 4, torch.int64).copy_(bits)
    words.mul_(_EVERY_BYTE).bitwise_and_(0x8040_2010_0804_0201 - 2**64)
    words.add_(_EVERY_BYTE * 0x7F).bitwise_right_shift_(3).bitwise_and_(_EVERY_BYTE * 0x10)
    work.codes.view(torch.int64).bitwise_or_(words)


def _unpack_q4_0(blocks: Tensor, work: _Work) -> None:
    _load_float16(work.scale[:, 0], blocks, 0)
    _split_nibbles(blocks[:, 2:], work)
    work.codes.sub_(8)


def _unpack_q4_1(blocks: Tensor, work: _Work) -> None:
    assert work.bias is not None
    _load_float16(work.scale[:, 0], blocks, 0)
    _load_float16(work.bias[:, 0], blocks, 2)
    _split_nibbles(blocks[:, 4:], work)


def _unpack_q5_0(blocks: Tensor, work: _Work) -> None:
    _load_float16(work.scale[:, 0], blocks, 0)
    _split_nibbles(blocks[:, 6:], work)
    _add_fifth_bits(blocks[:, 2:6], work)
    work.codes.sub_(16)


def _unpack_q5_1(blocks: Tensor, work: _Work) -> None:
    assert work.bias is not None
    _load_float16(work.scale[:, 0], blocks, 0)
    _load_float16(work.bias[:, 0], blocks, 2)
    _split_nibbles(blocks[:, 8:], work)
    _add_fifth_bits(blocks[:, 4:8], work)


def _unpack_q8_0(blocks: Tensor, work: _Work) -> None:
    _load_float16(work.scale[:, 0], blocks, 0)
    work.codes.copy_(blocks[:, 2:])


def _unpack_k_scales(blocks: Tensor, work: _Work) -> None:
    """Q4_K and Q5_K: float16 d and dmin, then eight 6-bit scales and eight 6-bit minima in 12 bytes. Takes 24 spare.

    Bytes 4-7 hold scales 0-3 in their low six bits and above them the top two bits of scales 4-7; bytes 8-11 the same
    for the minima; bytes 12-15 the low four bits of scales 4-7 (low nibble) and of minima 4-7 (high nibble).
    """
    assert work.bias is not None
    top, factor = work.temporary(16, 4), work.temporary(20, 1, torch.float32)
    for target, position, offset in ((work.scale, 0, 0), (work.bias, 8, 4)):
        source, sixes = blocks[:, 4 + offset : 8 + offset], work.temporary(position, 8)
        torch.bitwise_and(source, 0x3F, out=sixes[:, :4])
        torch.bitwise_right_shift(source, 2, out=sixes[:, 4:])
        torch.bitwise_right_shift(blocks[:, 12:16], offset, out=top)
        sixes[:, 4:].bitwise_and_(0x30).bitwise_or_(top.bitwise_and_(0x0F))
        _load_float16(factor[:, 0], blocks, offset // 2)
        target.copy_(sixes).mul_(factor)
    work.bias.neg_()


def _split_wide_nibbles(nibbles: Tensor, codes: Tensor) -> None:
    """nibbles: (num_blocks, k, n) bytes; codes: (num_blocks, k, 2, n), the low nibbles first."""
    torch.bitwise_and(nibbles, 0x0F, out=codes[:, :, 0])
    torch.bitwise_right_shift(nibbles, 4, out=codes[:, :, 1])


def _move_bits(source: Tensor, left: int, mask: int, out: Tensor) -> Tensor:
    shift = torch.bitwise_left_shift if left >= 0 else torch.bitwise_right_shift
    return shift(source, abs(left), out=out).bitwise_and_(mask)


def _unpack_q4_k(blocks: Tensor, work: _Work) -> None:
    _unpack_k_scales(blocks, work)
    _split_wide_nibbles(blocks[:, 16:].view(-1, 4, 32), work.codes.view(-1, 4, 2, 32))


def _unpack_q5_k(blocks: Tensor, work: _Work) -> None:
    _unpack_k_scales(blocks, work)
    _split_wide_nibbles(blocks[:, 48:].view(-1, 4, 32), work.codes.view(-1, 4, 2, 32))
    high, codes = work.temporary(24, 32), work.codes.view(-1, 8, 32)
    for group in range(8):
        codes[:, group].bitwise_or_(_move_bits(blocks[:, 16:48], 4 - group, 0x10, high))


def _unpack_q6_k(blocks: Tensor, work: _Work) -> None:
    _split_wide_nibbles(blocks[:, :128].view(-1, 2, 64), work.codes.view(-1, 2, 2, 64))
    high, codes = work.temporary(0, 64).view(-1, 2, 32), work.codes.view(-1, 2, 4, 32)
    for quarter in range(4):
        codes[:, :, quarter].bitwise_or_(_move_bits(blocks[:, 128:192].view(-1, 2, 32), 4 - 2 * quarter, 0x30, high))
    work.codes.sub_(32)
    factor = work.temporary(0, 1, torch.float32)
    _load_float16(factor[:, 0], blocks, 208)
    work.scale.copy_(blocks[:, 192:208].view(torch.int8)).mul_(factor)


_PACKINGS: dict[str, _Packing] = {
    "Q4_0": _Packing(_unpack_q4_0, 1, False, torch.int8, 16),
    "Q4_1": _Packing(_unpack_q4_1, 1, True, torch.uint8, 16),
    "Q5_0": _Packing(_unpack_q5_0, 1, False, torch.int8, 32),
    "Q5_1": _Packing(_unpack_q5_1, 1, True, torch.uint8, 32),
    "Q8_0": _Packing(_unpack_q8_0, 1, False, torch.int8, 0),
    "Q4_K": _Packing(_unpack_q4_k, 8, True, torch.uint8, 24),
    "Q5_K": _Packing(_unpack_q5_k, 8, True, torch.uint8, 56),
    "Q6_K": _Packing(_unpack_q6_k, 16, False, torch.int8, 64),
}

DEQUANTIZABLE = ("F32", "F16", "BF16", *_PACKINGS)
