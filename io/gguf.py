"""The header of a GGUF file (versions 2 and 3, little-endian). Nothing of the data part is needed.

A file is: "GGUF", u32 version, u64 tensor count, u64 metadata count; the metadata, each a string key, a u32 type and a
value; the tensor table, each a string name, u32 rank, u64 dimensions (fastest first), u32 ggml type, u64 offset
counted from the data part; padding up to `general.alignment`; the data. Strings are a u64 length and UTF-8.
"""

from __future__ import annotations

import struct
from typing import Any

from hetero.io.tensor_info import HeaderFile, TensorInfo, check_extents, first_duplicate, short, tensor_nbytes

MAX_HEADER_NBYTES = 64 << 20  # the largest vocabularies in use (260k tokens, 500k merges) need about 20 MiB
MAX_ARRAY_ITEMS = 8 << 20  # of all metadata arrays together: each costs a Python object
MAX_ARRAY_DEPTH = 4
MAX_RANK = 4
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
READ_AHEAD_NBYTES = 256 << 10

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "B", 10: "Q", 11: "q", 12: "d"}
_MIN_TENSOR_ENTRY_NBYTES = 8 + 4 + 4 + 8
_MIN_METADATA_ENTRY_NBYTES = 8 + 4 + 1

_GGML_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16",
    34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip


def read_gguf(file: HeaderFile) -> tuple[list[TensorInfo], dict[str, Any]]:
    """Return the tensors in file order and the metadata as plain Python values. Raises CheckpointError."""
    cursor = _Cursor(file)
    if file.identity.nbytes < 24 or cursor.take(4) != b"GGUF":
        raise file.malformed("does not start with a GGUF header")
    version = cursor.scalar("I")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        kind = "big-endian GGUF" if swapped in (2, 3) else f"GGUF version {version}"
        raise file.malformed(f"is {kind}; little-endian versions 2 and 3 can be read")
    num_tensors, num_metadata = cursor.scalar("Q"), cursor.scalar("Q")
    cursor.expect(num_tensors, _MIN_TENSOR_ENTRY_NBYTES, "tensors")
    cursor.expect(num_metadata, _MIN_METADATA_ENTRY_NBYTES, "metadata entries")

    metadata: dict[str, Any] = {}
    for _ in range(num_metadata):
        key = cursor.string("a metadata key")
        if key in metadata:
            raise file.malformed(f"has the metadata key {short(key)} twice")
        metadata[key] = cursor.value(cursor.scalar("I"), key)
    alignment = _alignment(file, metadata)
    table = [_table_entry(cursor) for _ in range(num_tensors)]
    data_offset = -(-cursor.position // alignment) * alignment
    tensors = [_tensor(file, entry, data_offset, alignment) for entry in table]
    twice = first_duplicate(tensor.name for tensor in tensors)
    if twice is not None:
        raise file.malformed(f"has the tensor {short(twice)} twice")
    check_extents(file, tensors, data_offset=data_offset, allow_holes=True)
    return tensors, metadata


def _alignment(file: HeaderFile, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise file.malformed(f"has the alignment {short(alignment)}, which is not a power of two up to {MAX_ALIGNMENT}")
    return alignment


def _table_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string("a tensor name")
    rank = cursor.scalar("I")
    if rank > MAX_RANK:
        raise cursor.file.malformed(f"tensor {short(name)} has {rank} dimensions, the limit is {MAX_RANK}")
    dimensions = cursor.numbers("Q", rank)
    return name, tuple(reversed(dimensions)), cursor.scalar("I"), cursor.scalar("Q")


def _tensor(
    file: HeaderFile, entry: tuple[str, tuple[int, ...], int, int], data_offset: int, alignment: int
) -> TensorInfo:
    name, shape, ggml_type, offset = entry
    if ggml_type not in _GGML_TYPES:
        raise file.malformed(f"tensor {short(name)} has the unknown or retired ggml type {ggml_type}")
    format_name = _GGML_TYPES[ggml_type]
    try:
        nbytes = tensor_nbytes(format_name, shape, by_rows=True)
    except ValueError as error:
        raise file.malformed(f"tensor {short(name)} {error}") from error
    if offset % alignment:
        raise file.malformed(f"tensor {short(name)} lies at offset {offset}, not a multiple of {alignment}")
    return TensorInfo(name, file.path, data_offset + offset, nbytes, format_name, shape)


class _Cursor:
    """Reads forward through the header. Every length is checked before anything of that length is allocated."""

    def __init__(self, file: HeaderFile) -> None:
        self.file = file
        self.position = 0
        self._buffer = bytearray()
        self._items_left = MAX_ARRAY_ITEMS

    def _advance(self, nbytes: int) -> int:
        start = self.position
        end = start + nbytes
        if end > len(self._buffer):
            self._fill(end)
        self.position = end
        return start

    def _fill(self, end: int) -> None:
        if end > self.file.identity.nbytes:
            raise self.file.malformed(
                f"has {self.file.identity.nbytes} bytes, its header needs at least {end}: truncated"
            )
        if end > MAX_HEADER_NBYTES:
            raise self.file.malformed(f"has a header of more than {MAX_HEADER_NBYTES} bytes, the limit")
        start = len(self._buffer)
        end = min(max(end, start + READ_AHEAD_NBYTES), self.file.identity.nbytes)
        self._buffer += self.file.read(start, end - start)

    def expect(self, count: int, entry_nbytes: int, what: str) -> None:
        if self.position + count * entry_nbytes > min(self.file.identity.nbytes, MAX_HEADER_NBYTES):
            raise self.file.malformed(f"claims {count} {what}, more than its header can hold")

    def take(self, nbytes: int) -> bytes:
        start = self._advance(nbytes)
        return bytes(self._buffer[start : start + nbytes])

    def numbers(self, code: str, count: int) -> tuple[Any, ...]:
        layout = struct.Struct(f"<{count}{code}")
        return layout.unpack_from(self._buffer, self._advance(layout.size))

    def scalar(self, code: str) -> Any:
        return self.numbers(code, 1)[0]

    def string(self, what: str) -> str:
        return self.strings(1, what)[0]

    def strings(self, count: int, what: str) -> list[str]:
        length_at = struct.Struct("<Q").unpack_from
        values = []
        try:
            for _ in range(count):
                (nbytes,) = length_at(self._buffer, self._advance(8))
                start = self._advance(nbytes)
                values.append(self._buffer[start : start + nbytes].decode())
        except UnicodeDecodeError as error:
            raise self.file.malformed(f"has {what} that is not UTF-8, before byte {self.position}") from error
        return values

    def value(self, value_type: int, key: str, depth: int = 0) -> Any:
        """One metadata value. Scalars become int, float, bool or str, arrays lists, nested as in the file."""
        if value_type == _STRING:
            return self.string(f"a value of {short(key)}")
        if value_type == _ARRAY:
            if depth == MAX_ARRAY_DEPTH:
                raise self.file.malformed(f"has arrays nested deeper than {MAX_ARRAY_DEPTH} in {short(key)}")
            return self._array(key, depth)
        return self._scalars(value_type, 1, key)[0]

    def _array(self, key: str, depth: int) -> list[Any]:
        item_type, count = self.scalar("I"), self.scalar("Q")
        if count > self._items_left:
            raise self.file.malformed(f"claims {count} items in {short(key)}, more than a header may have")
        self._items_left -= count
        if item_type == _STRING:
            self.expect(count, 8, f"strings in {short(key)}")
            return self.strings(count, f"a value of {short(key)}")
        if item_type == _ARRAY:
            return [self.value(_ARRAY, key, depth + 1) for _ in range(count)]
        return self._scalars(item_type, count, key)

    def _scalars(self, value_type: int, count: int, key: str) -> list[Any]:
        code = _SCALARS.get(value_type)
        if code is None:
            raise self.file.malformed(f"has the unknown metadata type {value_type} in {short(key)}")
        values = self.numbers(code, count)
        if value_type != _BOOL:
            return list(values)
        if any(value > 1 for value in values):
            raise self.file.malformed(f"has a truth value that is neither 0 nor 1 in {short(key)}")
        return [value == 1 for value in values]
