"""The header of a safetensors file, and the index file of a sharded checkpoint. Nothing of the data part is read.

A file is: 8 bytes little-endian header length N; N bytes of UTF-8 JSON, padded with spaces; the data. The JSON maps
each name to `{"dtype", "shape", "data_offsets": [begin, end]}`, offsets counted from the start of the data, and
`"__metadata__"` to a map of strings. The data has no holes and nothing after the last tensor.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from hetero.io.errors import CheckpointError
from hetero.io.tensor_info import (
    FORMAT_BLOCKS,
    HeaderFile,
    TensorInfo,
    check_extents,
    first_duplicate,
    short,
    tensor_nbytes,
)

MAX_HEADER_NBYTES = 100_000_000  # the format's own limit
MAX_INDEX_NBYTES = 100_000_000

# Every plain format, under the name the format's authors gave it; the packed GGUF ones never occur here.
_DTYPES = frozenset(name for name, (block_numel, _) in FORMAT_BLOCKS.items() if block_numel <= 4)


def read_safetensors(file: HeaderFile) -> tuple[list[TensorInfo], dict[str, str]]:
    """Return the tensors in header order and the `__metadata__`. Raises CheckpointError."""
    if file.identity.nbytes < 8:
        raise file.malformed(f"has {file.identity.nbytes} bytes, too few for a safetensors file")
    header_nbytes = int.from_bytes(file.read(0, 8), "little")
    if header_nbytes > min(MAX_HEADER_NBYTES, file.identity.nbytes - 8):
        raise file.malformed(
            f"claims a header of {header_nbytes} bytes; the file has {file.identity.nbytes}, "
            f"the limit is {MAX_HEADER_NBYTES}: truncated, or not a safetensors file"
        )
    header = parse_json_object(file, file.read(8, header_nbytes))
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise file.malformed("__metadata__ is not a map of strings")
    tensors = [_tensor(file, name, entry, 8 + header_nbytes) for name, entry in header.items()]
    check_extents(file, tensors, data_offset=8 + header_nbytes, allow_holes=False)
    return tensors, metadata


def _tensor(file: HeaderFile, name: str, entry: Any, data_offset: int) -> TensorInfo:
    def malformed(reason: str) -> NoReturn:
        raise file.malformed(f"tensor {short(name)} {reason}")

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        malformed("is not described by exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        malformed(f"has the unknown dtype {short(dtype)}")
    if not _is_int_list(shape):
        malformed(f"has a shape that is not a list of sizes: {short(shape)}")
    if not _is_int_list(offsets) or len(offsets) != 2 or not 0 <= offsets[0] <= offsets[1]:
        malformed(f"has data_offsets that are not [begin, end]: {short(offsets)}")
    try:
        nbytes = tensor_nbytes(dtype, tuple(shape), by_rows=False)
    except ValueError as error:
        malformed(str(error))
    if offsets[1] - offsets[0] != nbytes:
        malformed(f"has {short(offsets[1] - offsets[0])} bytes where {dtype} and its shape make {nbytes}")
    return TensorInfo(name, file.path, data_offset + offsets[0], nbytes, dtype, tuple(shape))


def _is_int_list(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)  # bool is an int to isinstance


def parse_json_object(file: HeaderFile, data: bytes) -> dict[str, Any]:
    """Parse one JSON object, refusing duplicate keys and names that are not valid Unicode. Raises CheckpointError."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise file.malformed(f"names {short(first_duplicate(name for name, _ in pairs))} twice")
        return result

    try:
        text = data.decode("utf-8")
        value = json.loads(text, object_pairs_hook=unique)
        if isinstance(value, dict):
            "".join(value).encode("utf-8")  # an escaped lone surrogate is legal JSON and no legal name
    except CheckpointError:
        raise
    except RecursionError:
        raise file.malformed("has JSON nested too deeply") from None
    except ValueError as error:
        raise file.malformed(f"has no valid JSON where its header should be: {short(str(error))}") from error
    if not isinstance(value, dict) or not text.startswith("{"):
        raise file.malformed("has JSON that is not an object where its header should be")
    return value


def read_weight_map(file: HeaderFile) -> tuple[dict[str, str], dict[str, Any]]:
    """Read a `*.safetensors.index.json`: tensor name -> shard file name, and its metadata. Raises CheckpointError.

    Shard names are plain names in the same folder: anything that could lead out of it is refused.
    """
    if file.identity.nbytes > MAX_INDEX_NBYTES:
        raise file.malformed(f"has {file.identity.nbytes} bytes, the limit for an index is {MAX_INDEX_NBYTES}")
    index = parse_json_object(file, file.read(0, file.identity.nbytes))
    weight_map, metadata = index.get("weight_map"), index.get("metadata", {})
    if not isinstance(weight_map, dict) or not weight_map:
        raise file.malformed("has no weight_map")
    if not isinstance(metadata, dict):
        raise file.malformed("has metadata that is not an object")
    for name, shard in weight_map.items():
        plain = isinstance(shard, str) and shard.isprintable() and not set(shard) & set("/\\:")
        if not plain or shard.startswith(".") or not shard.endswith(".safetensors"):
            raise file.malformed(
                f"maps {short(name)} to {short(shard)}, which is not the plain name of a .safetensors file beside it"
            )
    return weight_map, metadata
