"""Weight formats: how many bytes hold how many numbers. Plain formats are those of torch, packed ones those of GGUF."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Format:
    """A block of `block_numel` consecutive numbers of a row is `block_nbytes` bytes. A row is whole blocks."""

    name: str
    block_numel: int
    block_nbytes: int
    torch_dtype: torch.dtype | None
    """The dtype whose numbers these bytes are, or None for a packed format."""


_PLAIN = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_PACKED = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}

FORMATS: dict[str, Format] = {
    **{name: Format(name, 1, dtype.itemsize, dtype) for name, dtype in _PLAIN.items()},
    **{name: Format(name, numel, nbytes, None) for name, (numel, nbytes) in _PACKED.items()},
}


def format_for(name: str) -> Format:
    """Raises ValueError naming what is known."""
    known = FORMATS.get(name)
    if known is None:
        raise ValueError(f"the weight format {name!r} is not known here; known are {', '.join(FORMATS)}")
    return known


def row_nbytes(format: str, num_cols: int) -> int:  # noqa: A002 (the word everywhere else)
    """Bytes of a row of `num_cols` numbers. Raises ValueError where they are not whole blocks."""
    known = format_for(format)
    if num_cols < 0 or num_cols % known.block_numel:
        raise ValueError(f"a row of {num_cols} numbers is not whole {format} blocks of {known.block_numel}")
    return num_cols // known.block_numel * known.block_nbytes
