"""The table of weight formats, against the two packages that define them."""

from __future__ import annotations

import gguf
import pytest
import torch

from hetero.cpu_kernels.formats import FORMATS, row_nbytes
from hetero.io.tensor_info import FORMAT_BLOCKS


@pytest.mark.parametrize("name", [name for name, known in FORMATS.items() if known.torch_dtype is None])
def test_packed_formats_have_the_sizes_of_ggml(name: str) -> None:
    sizes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    assert (FORMATS[name].block_numel, FORMATS[name].block_nbytes) == sizes


@pytest.mark.parametrize("name", FORMATS)
def test_the_checkpoint_index_agrees(name: str) -> None:
    assert FORMAT_BLOCKS[name] == (FORMATS[name].block_numel, FORMATS[name].block_nbytes)


@pytest.mark.parametrize("name", [name for name, known in FORMATS.items() if known.torch_dtype is not None])
def test_plain_formats_have_the_size_of_their_dtype(name: str) -> None:
    assert row_nbytes(name, 7) == torch.empty(7, dtype=FORMATS[name].torch_dtype).nbytes


@pytest.mark.parametrize(
    ("name", "num_cols", "nbytes"), [("Q4_1", 576, 360), ("Q8_0", 576, 612), ("Q4_1", 1536, 960), ("Q6_K", 512, 420)]
)
def test_row_nbytes_of_known_rows(name: str, num_cols: int, nbytes: int) -> None:
    assert row_nbytes(name, num_cols) == nbytes


@pytest.mark.parametrize("num_cols", [31, 33, -32])
def test_a_row_of_part_of_a_block_is_refused(num_cols: int) -> None:
    with pytest.raises(ValueError, match=rf"{num_cols} numbers is not whole Q4_0 blocks of 32"):
        row_nbytes("Q4_0", num_cols)


def test_an_unknown_format_is_named() -> None:
    with pytest.raises(ValueError, match="'Q9_9' is not known"):
        row_nbytes("Q9_9", 32)
