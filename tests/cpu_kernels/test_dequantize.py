"""Dequantisation against `gguf.quants`, bit for bit, for every format, address, size and output dtype."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hetero.cpu_kernels.dequantize import DEQUANTIZABLE, dequantize_rows, dequantize_scratch_nbytes
from hetero.cpu_kernels.formats import FORMATS, row_nbytes

DTYPES = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "bf16", "f16"])
formats = pytest.mark.parametrize("name", DEQUANTIZABLE)


def random_bytes(nbytes: int, *, seed: int = 0, address: int = 0) -> Tensor:
    """`nbytes` random bytes whose address is `address` modulo 64."""
    memory = torch.empty(nbytes + 128, dtype=torch.uint8)
    start = (address - memory.data_ptr()) % 64
    return memory[start : start + nbytes].random_(0, 256, generator=torch.Generator().manual_seed(seed))


def num_cols_for(name: str) -> int:
    return 3 * max(32, FORMATS[name].block_numel)


def reference(packed: Tensor, name: str, num_rows: int) -> Tensor:
    rows = packed.numpy().reshape(num_rows, -1).copy()
    with np.errstate(all="ignore"):
        return torch.from_numpy(gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[name]).copy())


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal to the last bit, signs of zeros included, but for the payload of NaNs."""
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan)
    bits = DTYPES[expected.dtype]
    differ = (actual.view(bits) != expected.view(bits)) & ~nan
    assert not differ.any(), f"{int(differ.sum())} of {nan.numel()} differ, first at {differ.nonzero()[0].tolist()}"


@dtypes
@formats
@pytest.mark.parametrize("num_rows", [1, 2, 17])
def test_random_blocks_equal_the_reference(name: str, num_rows: int, dtype: torch.dtype) -> None:
    # Random bytes: one scale in 32 is infinite or NaN, and one in 32 is a denormal.
    num_cols = num_cols_for(name)
    packed = random_bytes(num_rows * row_nbytes(name, num_cols), seed=num_rows)
    out = torch.full((num_rows, num_cols), 7, dtype=dtype)
    dequantize_rows(packed, name, num_cols, out)
    assert_same_bits(out, reference(packed, name, num_rows).to(dtype))


@formats
@pytest.mark.parametrize("address", [1, 2, 3, 6, 33])
def test_any_address(name: str, address: int) -> None:
    num_cols = num_cols_for(name)
    packed = random_bytes(5 * row_nbytes(name, num_cols), address=address)
    for dtype in DTYPES:
        out = torch.empty(5, num_cols, dtype=dtype)
        dequantize_rows(packed.view(5, -1), name, num_cols, out)
        assert_same_bits(out, reference(packed, name, 5).to(dtype))


@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00, 0x0000, 0x8000, 0x0001], ids=lambda bits: f"{bits:#06x}")
@pytest.mark.parametrize("name", [name for name in DEQUANTIZABLE if FORMATS[name].torch_dtype is None])
def test_infinite_nan_zero_and_denormal_scales(name: str, bits: int) -> None:
    block_nbytes = FORMATS[name].block_nbytes
    packed = random_bytes(4 * block_nbytes).view(4, -1)
    scale_at = {"Q6_K": 208}.get(name, 0)
    packed[:, scale_at : scale_at + 2] = torch.tensor([bits & 0xFF, bits >> 8], dtype=torch.uint8)
    out = torch.empty(4, FORMATS[name].block_numel)
    dequantize_rows(packed, name, FORMATS[name].block_numel, out)
    assert_same_bits(out, reference(packed, name, 4))


@dtypes
@formats
@pytest.mark.parametrize("num_runs", [1, 4, 50])
def test_the_length_of_a_run_changes_nothing(name: str, num_runs: int, dtype: torch.dtype) -> None:
    num_rows, num_cols = 50, num_cols_for(name)
    packed = random_bytes(num_rows * row_nbytes(name, num_cols), address=1)
    whole = dequantize_scratch_nbytes(name, num_rows, num_cols, dtype)
    limit = whole // num_runs
    out = torch.empty(num_rows, num_cols, dtype=dtype)
    dequantize_rows(packed, name, num_cols, out, scratch_nbytes=limit)
    assert dequantize_scratch_nbytes(name, num_rows, num_cols, dtype, scratch_nbytes=limit) <= max(limit, 2500)
    assert_same_bits(out, reference(packed, name, num_rows).to(dtype))


class AllocationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sums the bytes of every tensor an operation returns in memory of its own."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        known = {a.untyped_storage().data_ptr() for a in (*args, *(kwargs or {}).values()) if isinstance(a, Tensor)}
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in known:
            self.nbytes += result.untyped_storage().nbytes()
        return result


@dtypes
@formats
def test_with_scratch_nothing_is_allocated_and_without_it_no_more_than_said(name: str, dtype: torch.dtype) -> None:
    num_rows, num_cols = 9, num_cols_for(name)
    packed = random_bytes(num_rows * row_nbytes(name, num_cols), address=1)
    out = torch.empty(num_rows, num_cols, dtype=dtype)
    bound = dequantize_scratch_nbytes(name, num_rows, num_cols, dtype)
    scratch = random_bytes(bound)
    with AllocationCounter() as counter:  # type: ignore[no-untyped-call]
        dequantize_rows(packed, name, num_cols, out, scratch=scratch)
    assert counter.nbytes == 0
    assert_same_bits(out, reference(packed, name, num_rows).to(dtype))
    with AllocationCounter() as counter:  # type: ignore[no-untyped-call]
        dequantize_rows(packed, name, num_cols, out)
    assert counter.nbytes <= bound + 64


def test_memory_around_the_result_and_the_packed_bytes_is_untouched() -> None:
    packed = random_bytes(3 * row_nbytes("Q4_1", 64))
    before = packed.clone()
    memory = torch.full((5, 64), 42.0)
    dequantize_rows(packed, "Q4_1", 64, memory[1:4])
    assert torch.equal(packed, before)
    assert (memory[[0, 4]] == 42).all()


def test_no_rows_is_no_work() -> None:
    dequantize_rows(torch.empty(0, dtype=torch.uint8), "Q4_K", 256, torch.empty(0, 256))


@pytest.mark.parametrize(
    ("packed", "out", "message"),
    [
        (torch.empty(39, dtype=torch.uint8), torch.empty(2, 32), "packed must be 40 contiguous bytes of Q4_1"),
        (torch.empty(40, dtype=torch.int8), torch.empty(2, 32), "packed must be 40"),
        (torch.empty(80, dtype=torch.uint8)[::2], torch.empty(2, 32), "packed must be 40"),
        (torch.empty(40, dtype=torch.uint8), torch.empty(2, 32, dtype=torch.float64), "out must be contiguous"),
        (torch.empty(40, dtype=torch.uint8), torch.empty(32, 2).t(), "out must be contiguous"),
        (torch.empty(40, dtype=torch.uint8), torch.empty(1, 64), "out must be contiguous"),
    ],
    ids=["short", "not-bytes", "strided", "out-dtype", "out-transposed", "out-shape"],
)
def test_sizes_that_do_not_fit_are_refused(packed: Tensor, out: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dequantize_rows(packed, "Q4_1", 32, out)


@pytest.mark.parametrize("name", ["Q4_1", "F16"])
def test_scratch_that_is_too_small_or_misaligned_is_refused(name: str) -> None:
    packed, out = random_bytes(row_nbytes(name, 32), address=1), torch.empty(1, 32)
    with pytest.raises(ValueError, match="scratch has 1 bytes, at least"):
        dequantize_rows(packed, name, 32, out, scratch=random_bytes(1))
    with pytest.raises(ValueError, match="at a multiple of 64"):
        dequantize_rows(packed, name, 32, out, scratch=random_bytes(4096, address=8))


@pytest.mark.parametrize("name", ["I64", "Q2_K", "F64"])
def test_formats_without_a_dequantisation_are_named(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        dequantize_rows(torch.empty(0, dtype=torch.uint8), name, 32, torch.empty(0, 32))
