"""Whatever the bytes: a valid index whose extents are in range and disjoint, or CheckpointError, in little memory."""

from __future__ import annotations

import json
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hetero.io.checkpoint import read_index
from hetero.io.errors import CheckpointError
from hetero.io.gguf import _GGML_TYPES, _SCALARS
from hetero.io.tensor_info import FORMAT_BLOCKS
from tests.io.checkpoint_bytes import gguf_bytes, gguf_entry, gguf_string, gguf_tensor, safetensors_bytes

MAX_NBYTES = 50 << 20

fuzz = settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def check(path: Path, data: bytes) -> bool:
    """Read `data` as a checkpoint; True if it was accepted."""
    path.write_bytes(data)
    tracemalloc.start()
    try:
        index = read_index(path)
    except CheckpointError as error:
        assert error.path == path
        assert str(error).isprintable()
        return False
    finally:
        _, peak_nbytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_nbytes < MAX_NBYTES
    end = 8
    for tensor in sorted(index.tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        assert tensor.offset >= end
        end = tensor.offset + tensor.nbytes
        block_numel, block_nbytes = FORMAT_BLOCKS[tensor.format]
        numel = 1
        for size in tensor.shape:
            numel *= size
        assert tensor.nbytes * block_numel == numel * block_nbytes
    assert end <= len(data)
    index.verify()
    return True


def valid_safetensors() -> bytes:
    header = {
        "__metadata__": {"format": "pt"},
        "model.embed.weight": {"dtype": "BF16", "shape": [8, 4], "data_offsets": [0, 64]},
        "model.norm.weight": {"dtype": "F32", "shape": [4], "data_offsets": [64, 80]},
        "none": {"dtype": "I64", "shape": [0], "data_offsets": [80, 80]},
    }
    return safetensors_bytes(header, bytes(80))


def valid_gguf() -> bytes:
    metadata = [
        gguf_entry("general.architecture", 8, gguf_string("llama")),
        gguf_entry("general.alignment", 4, struct.pack("<I", 64)),
        gguf_entry("tokens", 9, struct.pack("<IQ", 8, 3) + b"".join(gguf_string(text) for text in ("a", "", "ß"))),
        gguf_entry("scores", 9, struct.pack("<IQ3f", 6, 3, 0.5, 1.5, -1)),
        gguf_entry("nested", 9, struct.pack("<IQ", 9, 2) + struct.pack("<IQ2b", 1, 2, 3, -4) * 2),
        gguf_entry("flag", 7, b"\1"),
    ]
    tensors = [gguf_tensor("q", [32, 2], 3, 0), gguf_tensor("norm", [4], 0, 64), gguf_tensor("h", [2, 2, 2], 1, 128)]
    return gguf_bytes(tensors, metadata, bytes(144), alignment=64)


SEEDS = {"model.safetensors": valid_safetensors(), "model.gguf": valid_gguf()}
seeds = pytest.mark.parametrize("name", SEEDS)


@seeds
def test_the_seed_is_valid(name: str, tmp_path: Path) -> None:
    assert check(tmp_path / name, SEEDS[name])


@seeds
def test_every_truncation_is_refused(name: str, tmp_path: Path) -> None:
    for nbytes in range(len(SEEDS[name])):
        assert not check(tmp_path / name, SEEDS[name][:nbytes])


@seeds
def test_every_byte_set_to_extremes(name: str, tmp_path: Path) -> None:
    accepted = 0
    for position in range(len(SEEDS[name])):
        for value in (0x00, 0xFF, SEEDS[name][position] ^ 0x80):
            data = bytearray(SEEDS[name])
            data[position] = value
            accepted += check(tmp_path / name, bytes(data))
    assert accepted  # bytes of the data part are anyone's


@seeds
@fuzz
@given(seed=st.integers(0, 2**32), num_flips=st.integers(1, 12))
def test_random_damage(name: str, tmp_path: Path, seed: int, num_flips: int) -> None:
    rng, data = random.Random(seed), bytearray(SEEDS[name])
    for _ in range(num_flips):
        position = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[position] ^= 1 << rng.randrange(8)
            case 1:
                data[position : position + 8] = rng.randbytes(8)
            case 2:
                del data[position : position + rng.randrange(1, 9)]
            case _:
                data[position:position] = rng.choice([b"\0" * 8, b"\xff" * 8, data[:position], rng.randbytes(4)])
    check(tmp_path / name, bytes(data))


@seeds
@fuzz
@given(data=st.binary(max_size=300))
def test_random_bytes_after_the_magic(name: str, tmp_path: Path, data: bytes) -> None:
    magic = {"model.gguf": b"GGUF\3\0\0\0", "model.safetensors": struct.pack("<Q", len(data) // 2)}[name]
    check(tmp_path / name, magic + data)


sizes = st.one_of(st.integers(0, 6), st.sampled_from([-1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 10**30]))
scalars = st.one_of(sizes, st.booleans(), st.none(), st.floats(), st.text(max_size=3))
offsets = st.tuples(st.integers(0, 40), st.integers(0, 40)).map(list)
entries = st.fixed_dictionaries(
    {
        "dtype": st.one_of(st.sampled_from(["F32", "F16", "U8", "F4", "BOOL"]), scalars),
        "shape": st.one_of(st.lists(st.integers(0, 4), max_size=3), st.lists(scalars, max_size=3), scalars),
        "data_offsets": st.one_of(offsets, st.lists(scalars, max_size=3), scalars),
    }
)
headers = st.dictionaries(st.text(max_size=4), st.one_of(entries, scalars, st.just({})), max_size=4)


@fuzz
@given(header=headers, data_nbytes=st.integers(0, 60))
def test_random_safetensors_headers(tmp_path: Path, header: dict[str, Any], data_nbytes: int) -> None:
    check(tmp_path / "model.safetensors", safetensors_bytes(header, bytes(data_nbytes)))


@fuzz
@given(weight_map=st.dictionaries(st.text(max_size=3), st.one_of(st.just("s.safetensors"), scalars), max_size=3))
@example(weight_map={"a": "s.safetensors"})
def test_random_weight_maps(tmp_path: Path, weight_map: dict[str, Any]) -> None:
    shard = {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    (tmp_path / "s.safetensors").write_bytes(safetensors_bytes(shard, b"x"))
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": weight_map}))
    try:
        index = read_index(path)
    except CheckpointError:
        assert weight_map != {"a": "s.safetensors"}
    else:
        assert weight_map == {"a": "s.safetensors"}
        assert index.tensors.keys() == {"a"}


u64 = st.one_of(st.integers(0, 8), st.sampled_from([32, 64, 96, 128, 2**31, 2**32, 2**62, 2**63, 2**64 - 1]))
keys = st.sampled_from(["a", "b", "general.alignment", "split.count", "ß" * 40])
value_types = st.one_of(st.sampled_from([*_SCALARS, 8, 9]), st.integers(0, 2**32 - 1))
payloads = st.one_of(
    st.binary(max_size=20),
    st.builds(struct.pack, st.just("<Q"), u64),
    st.builds(
        lambda kind, count, rest: struct.pack("<IQ", kind, count) + rest, value_types, u64, st.binary(max_size=40)
    ),
    st.text(max_size=4).map(gguf_string),
)
metadata_entries = st.builds(gguf_entry, keys, value_types, payloads)
table_entries = st.builds(
    gguf_tensor,
    st.sampled_from(["a", "b", "c", "x" * 100]),
    st.lists(u64, max_size=5),
    st.one_of(st.sampled_from(list(_GGML_TYPES)), st.integers(0, 2**32 - 1)),
    u64,
)


@fuzz
@given(
    tensors=st.lists(table_entries, max_size=3),
    metadata=st.lists(metadata_entries, max_size=3),
    data_nbytes=st.integers(0, 400),
    count=st.one_of(st.none(), u64),
)
def test_random_gguf_headers(
    tmp_path: Path, tensors: list[bytes], metadata: list[bytes], data_nbytes: int, count: int | None
) -> None:
    check(tmp_path / "model.gguf", gguf_bytes(tensors, metadata, bytes(data_nbytes), num_tensors=count))


def test_a_header_that_claims_gigabytes_in_a_big_file_is_refused_in_little_memory(tmp_path: Path) -> None:
    """The file is large (and sparse), so a bound by the file's size alone would not do."""
    path = tmp_path / "model.gguf"
    huge = struct.pack("<IQ", 0, 2**31)
    for metadata in (gguf_entry("k", 9, huge), gguf_entry("k", 8, struct.pack("<Q", 2**31))):
        with path.open("wb") as file:
            file.write(gguf_bytes([], [metadata]))
            file.truncate(2**33)
        tracemalloc.start()
        with pytest.raises(CheckpointError, match=r"more than a header may have|has a header of more than"):
            read_index(path)
        assert tracemalloc.get_traced_memory()[1] < MAX_NBYTES
        tracemalloc.stop()
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 2**32))
        file.truncate(2**33)
    with pytest.raises(CheckpointError, match="claims a header of 4294967296 bytes"):
        read_index(path)
