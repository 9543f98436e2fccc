"""Checkpoint files built byte by byte, so that every byte can also be built wrong."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any


def safetensors_bytes(header: Any, data: bytes = b"", *, header_nbytes: int | None = None) -> bytes:
    """A safetensors file; `header` is an object, or the text of one."""
    text = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if header_nbytes is None else header_nbytes) + text + data


def gguf_string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def gguf_entry(key: str, value_type: int, payload: bytes) -> bytes:
    return gguf_string(key) + struct.pack("<I", value_type) + payload


def gguf_tensor(name: str, dims: Sequence[int], ggml_type: int, offset: int) -> bytes:
    return gguf_string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, ggml_type, offset)


def gguf_bytes(
    tensors: Sequence[bytes] = (),
    metadata: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    num_tensors: int | None = None,
    num_metadata: int | None = None,
    alignment: int = 32,
) -> bytes:
    num_tensors = len(tensors) if num_tensors is None else num_tensors
    num_metadata = len(metadata) if num_metadata is None else num_metadata
    header = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_metadata) + b"".join(metadata) + b"".join(tensors)
    return header + bytes(-len(header) % alignment) + data
