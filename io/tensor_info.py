"""What a checkpoint says about its tensors: formats, extents, and the identity of the files they lie in."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hetero.io.errors import CheckpointError

MAX_NUMEL = 2**63 - 1

# Format name -> (numbers in a block, bytes of a block). Plain formats are blocks of one number; the names of plain
# formats are those of safetensors, the names of packed ones those of ggml. Q8_1 and Q8_K exist only inside ggml's
# kernels, never in a file, so they are not here.
FORMAT_BLOCKS: dict[str, tuple[int, int]] = {
    "F64": (1, 8), "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "C64": (1, 8),
    "I64": (1, 8), "I32": (1, 4), "I16": (1, 2), "I8": (1, 1),
    "U64": (1, 8), "U32": (1, 4), "U16": (1, 2), "U8": (1, 1), "BOOL": (1, 1),
    "F8_E4M3": (1, 1), "F8_E5M2": (1, 1), "F8_E8M0": (1, 1), "F8_E4M3FNUZ": (1, 1), "F8_E5M2FNUZ": (1, 1),
    "F4": (2, 1), "F6_E2M3": (4, 3), "F6_E3M2": (4, 3),
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34),
    "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
    "IQ2_XXS": (256, 66), "IQ2_XS": (256, 74), "IQ2_S": (256, 82), "IQ3_XXS": (256, 98), "IQ3_S": (256, 110),
    "IQ1_S": (256, 50), "IQ1_M": (256, 56), "IQ4_NL": (32, 18), "IQ4_XS": (256, 136),
    "TQ1_0": (256, 54), "TQ2_0": (256, 66), "MXFP4": (32, 17), "NVFP4": (64, 36), "Q1_0": (128, 18),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """The file that was read, so that a later look can tell whether it is still that file, unchanged."""

    device: int
    inode: int
    nbytes: int
    mtime_ns: int

    @classmethod
    def of(cls, path_or_fd: str | os.PathLike[str] | int) -> FileIdentity:
        """Stat a path (following links) or an open descriptor. Raises OSError as os.stat does."""
        status = os.stat(path_or_fd)
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    def difference(self, now: FileIdentity) -> str | None:
        """Say how `now` differs from what was read, or None."""
        if now.nbytes != self.nbytes:
            what = "was truncated" if now.nbytes < self.nbytes else "has grown"
            return f"{what} since it was read: {self.nbytes} bytes then, {now.nbytes} now"
        if (now.device, now.inode) != (self.device, self.inode):
            return "was replaced by another file since it was read"
        if now.mtime_ns != self.mtime_ns:
            return "was modified since it was read"
        return None


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a checkpoint: where its bytes lie and what they mean."""

    name: str
    path: Path
    offset: int
    """Absolute in the file, bytes."""
    nbytes: int
    format: str
    """A key of FORMAT_BLOCKS."""
    shape: tuple[int, ...]
    """torch order, rows first: GGUF's dimensions reversed."""


class HeaderFile:
    """A regular file opened read-only for its header. Owns the descriptor: use it as a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # Looked at before it is opened: opening a FIFO would block.
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise self.malformed("is not a regular file")
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise self.malformed(f"cannot be opened: {error}") from error
        self.identity = FileIdentity.of(self._fd)

    def __enter__(self) -> HeaderFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def malformed(self, reason: str) -> CheckpointError:
        return CheckpointError(self.path, reason)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Read exactly `nbytes`. Raises CheckpointError on an I/O error or if the file ends before."""
        parts: list[bytes] = []
        end = offset + nbytes
        while offset < end:
            try:
                part = os.pread(self._fd, end - offset, offset)
            except OSError as error:
                raise self.malformed(f"cannot be read at offset {offset}: {error}") from error
            if not part:
                raise self.malformed(f"ends at byte {offset}, inside its header")
            parts.append(part)
            offset += len(part)
        return b"".join(parts)


def tensor_nbytes(format_name: str, shape: tuple[int, ...], *, by_rows: bool) -> int:
    """Bytes of a tensor of this format and shape.

    `by_rows`: every row is whole blocks (GGUF); otherwise only the tensor as a whole is (safetensors).
    Raises ValueError with the reason where the shape does not fit the format.
    """
    numel = 1
    for size in shape:
        if not 0 <= size <= MAX_NUMEL:
            raise ValueError(f"has the impossible dimension {size}")
        numel *= size
    if numel > MAX_NUMEL:
        raise ValueError(f"has more numbers than fit in 63 bits: shape {short(shape)}")
    block_numel, block_nbytes = FORMAT_BLOCKS[format_name]
    row_numel = (shape[-1] if shape else 1) if by_rows else numel
    if row_numel % block_numel:
        raise ValueError(f"has rows of {row_numel}, which {format_name} blocks of {block_numel} do not divide")
    return numel // block_numel * block_nbytes


def check_extents(file: HeaderFile, tensors: Iterable[TensorInfo], *, data_offset: int, allow_holes: bool) -> None:
    """Raise CheckpointError unless the tensors lie in the data part of `file` and none overlaps another.

    Without `allow_holes` they must also cover the data part exactly, as the safetensors format demands.
    """
    end, previous = data_offset, "the header"
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset + tensor.nbytes > file.identity.nbytes:
            raise file.malformed(
                f"tensor {short(tensor.name)} ends at byte {tensor.offset + tensor.nbytes}, "
                f"the file at {file.identity.nbytes}: truncated?"
            )
        if tensor.offset < end:
            raise file.malformed(f"tensor {short(tensor.name)} overlaps {previous}")
        if tensor.offset > end and not allow_holes:
            raise file.malformed(f"{tensor.offset - end} bytes before tensor {short(tensor.name)} belong to no tensor")
        end, previous = tensor.offset + tensor.nbytes, f"tensor {short(tensor.name)}"
    if end != file.identity.nbytes and not allow_holes:
        raise file.malformed(f"{file.identity.nbytes - end} bytes at its end belong to no tensor")


def first_duplicate(names: Iterable[str]) -> str | None:
    """The first name that occurs a second time, or None."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def short(value: object, *, limit: int = 80) -> str:
    """The repr of something read from a file, cut so that a hostile name cannot fill an error message."""
    text = ascii(value[:limit] if isinstance(value, (str, tuple, list)) else value)
    return text if len(text) <= limit else f"{text[:limit]}..."
