"""The checkpoint index: what valid files say, and that everything else is refused with file and reason."""

from __future__ import annotations

import json
import os
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hetero.io import gguf as own_gguf
from hetero.io.checkpoint import CheckpointIndex, FileIdentity, read_index
from hetero.io.errors import CheckpointError
from hetero.io.tensor_info import FORMAT_BLOCKS, HeaderFile
from tests.io.checkpoint_bytes import gguf_bytes, gguf_entry, gguf_string, gguf_tensor, safetensors_bytes

U8, U32, F32, BOOL, STRING, ARRAY, U64, F64 = 0, 4, 6, 7, 8, 9, 10, 12
GGML_F32, GGML_Q4_1 = 0, 3


def entry(shape: list[Any], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def bytes_of(index: CheckpointIndex, name: str) -> bytes:
    tensor = index.tensors[name]
    return tensor.path.read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, bytes], Path]:
    def write_file(name: str, data: bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(data)
        return path

    return write_file


# --- valid files -----------------------------------------------------------------------------------------------------

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


def test_safetensors_written_by_the_package(tmp_path: Path) -> None:
    tensors = {name: torch.arange(6).reshape(2, 3).to(dtype) for name, dtype in DTYPES.items()}
    tensors |= {"scalar": torch.tensor(3.5), "none": torch.empty(0, 4)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    index = read_index(tmp_path / "model.safetensors")
    assert index.kind == "safetensors"
    assert index.metadata == {"format": "pt"}
    assert index.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert index.tensors[name].shape == tuple(tensor.shape)
        assert bytes_of(index, name) == bytes(tensor.reshape(-1).view(torch.uint8).tolist())
    assert {name: index.tensors[name].format for name in DTYPES} == {name: name for name in DTYPES}
    assert read_index(tmp_path).tensors == index.tensors


def test_sharded_safetensors(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors", metadata={"format": "pt"})
    save_file({"b": torch.zeros(3), "extra": torch.ones(1)}, tmp_path / "model-00002-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    text = json.dumps({"metadata": {"total_size": 20}, "weight_map": weight_map})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        index = read_index(path)
        assert {name: t.path.name for name, t in index.tensors.items() if name != "extra"} == weight_map
        assert "extra" in index.tensors
        assert index.metadata == {"format": "pt", "total_size": 20}
        assert {file.name for file in index.files} == {*weight_map.values(), "model.safetensors.index.json"}


def test_paths_stay_good_when_the_working_directory_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    index = read_index("model.safetensors")
    monkeypatch.chdir("/")
    index.verify()
    assert index.tensors["a"].path == tmp_path / "model.safetensors"


@pytest.mark.parametrize("alignment", [32, 64, 4096])
def test_gguf_written_by_the_package(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    values = {
        "u8": ("add_uint8", 200), "i8": ("add_int8", -5), "u16": ("add_uint16", 60000), "i16": ("add_int16", -300),
        "u32": ("add_uint32", 4_000_000_000), "i32": ("add_int32", -7), "u64": ("add_uint64", 2**63 + 1),
        "i64": ("add_int64", -(2**62)), "f32": ("add_float32", 0.5), "f64": ("add_float64", 0.1),
        "yes": ("add_bool", True), "text": ("add_string", "größe ▁x"), "words": ("add_array", ["a", "", "▁b"]),
        "numbers": ("add_array", [1, -2, 3]), "floats": ("add_array", [0.5, -2.0]),
        "flags": ("add_array", [True, False]), "nested": ("add_array", [[1, 2], [3, 4]]),
    }  # fmt: skip
    for key, (method, value) in values.items():
        getattr(writer, method)(key, value)
    rng = np.random.default_rng(0)
    arrays = {"w": rng.standard_normal((3, 64), dtype=np.float32), "norm": np.ones(5, np.float32)}
    arrays["h"] = rng.standard_normal((2, 3, 4)).astype(np.float16)
    packed = gguf.quants.quantize(rng.standard_normal((2, 32), dtype=np.float32), gguf.GGMLQuantizationType.Q4_1)
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.add_tensor("q", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    index = read_index(path)
    assert {key: index.metadata[key] for key in values} == {key: value for key, (_, value) in values.items()}
    assert type(index.metadata["yes"]) is bool
    assert {name: t.format for name, t in index.tensors.items()} == {"w": "F32", "norm": "F32", "h": "F16", "q": "Q4_1"}
    for name, array in {**arrays, "q": packed}.items():
        assert bytes_of(index, name) == array.tobytes()
        assert index.tensors[name].offset % alignment == 0
    assert index.tensors["w"].shape == (3, 64)
    assert index.tensors["h"].shape == (2, 3, 4)
    assert index.tensors["q"].shape == (2, 32)


def test_smollm2(smollm2_gguf: Path) -> None:
    index = read_index(smollm2_gguf)
    assert Counter(t.format for t in index.tensors.values()) == {"Q4_1": 210, "F32": 61, "Q8_0": 1}
    assert index.tensors["token_embd.weight"].shape == (49152, 576)
    assert len(index.metadata["tokenizer.ggml.tokens"]) == 49152
    theirs = gguf.GGUFReader(smollm2_gguf)
    assert [(t.name, t.data_offset, t.n_bytes, t.tensor_type.name) for t in theirs.tensors] == [
        (t.name, t.offset, t.nbytes, t.format) for t in index.tensors.values()
    ]
    assert {key: field.contents() for key, field in theirs.fields.items() if "GGUF." not in key} == index.metadata


def test_only_the_header_is_read(smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[int] = []
    read = HeaderFile.read

    def spy(self: HeaderFile, offset: int, nbytes: int) -> bytes:
        ends.append(offset + nbytes)
        return read(self, offset, nbytes)

    monkeypatch.setattr(HeaderFile, "read", spy)
    index = read_index(smollm2_gguf)
    data_offset = min(t.offset for t in index.tensors.values())
    assert max(ends) < data_offset + own_gguf.READ_AHEAD_NBYTES


def test_the_block_sizes_are_those_of_ggml() -> None:
    for ggml_type, name in own_gguf._GGML_TYPES.items():
        theirs = gguf.GGMLQuantizationType(ggml_type)
        assert (theirs.name, gguf.GGML_QUANT_SIZES[theirs]) == (name, FORMAT_BLOCKS[name])
    internal = {"Q8_1", "Q8_K"}
    assert {t.name for t in gguf.GGMLQuantizationType} - set(own_gguf._GGML_TYPES.values()) == internal


# --- malformed safetensors -------------------------------------------------------------------------------------------

BAD_SAFETENSORS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "has 0 bytes, too few"),
    "no-header": (b"\x10\0\0\0\0\0\0", "too few"),
    "header-past-end": (safetensors_bytes({}, header_nbytes=3), "claims a header of 3 bytes; the file has 10"),
    "absurd-header": (safetensors_bytes({}, header_nbytes=2**63), "claims a header of 9223372036854775808"),
    "not-json": (safetensors_bytes("{nonsense}"), "no valid JSON"),
    "not-utf8": (struct.pack("<Q", 4) + b'{"\xff"', "no valid JSON"),
    "not-an-object": (safetensors_bytes([]), "not an object"),
    "space-first": (safetensors_bytes(" {}"), "not an object"),
    "deep-json": (safetensors_bytes('{"a":' + "[" * 100_000 + "]" * 100_000 + "}"), "nested too deeply"),
    "long-number": (safetensors_bytes('{"a":' + "9" * 5000 + "}"), "no valid JSON"),
    "duplicate": (safetensors_bytes('{"a":{},"a":{}}'), "names 'a' twice"),
    "duplicate-field": (safetensors_bytes('{"a":{"dtype":"F32","dtype":"F32"}}'), "names 'dtype' twice"),
    "surrogate": (safetensors_bytes('{"\\ud800":1}'), "no valid JSON"),
    "metadata": (safetensors_bytes({"__metadata__": {"a": 1}}), "__metadata__ is not a map of strings"),
    "no-dtype": (safetensors_bytes({"a": {"shape": [], "data_offsets": [0, 4]}}, bytes(4)), "exactly dtype, shape"),
    "unknown-dtype": (safetensors_bytes({"a": entry([1], 0, 4, "F33")}, bytes(4)), "unknown dtype 'F33'"),
    "packed-dtype": (safetensors_bytes({"a": entry([32], 0, 20, "Q4_1")}, bytes(20)), "unknown dtype 'Q4_1'"),
    "dtype-list": (safetensors_bytes({"a": {**entry([1], 0, 4), "dtype": ["F32"]}}, bytes(4)), "unknown dtype"),
    "float-shape": (safetensors_bytes({"a": entry([1.0], 0, 4)}, bytes(4)), "not a list of sizes"),
    "bool-shape": (safetensors_bytes({"a": entry([True], 0, 4)}, bytes(4)), "not a list of sizes"),
    "negative-dim": (safetensors_bytes({"a": entry([-1, -1], 0, 4)}, bytes(4)), "impossible dimension -1"),
    "huge-dim": (safetensors_bytes({"a": entry([0, 2**63], 0, 0)}), "impossible dimension"),
    "overflow": (safetensors_bytes({"a": entry([2**40, 2**40], 0, 0)}), "more numbers than fit"),
    "wrong-size": (safetensors_bytes({"a": entry([2], 0, 4)}, bytes(4)), "has 4 bytes where F32 and its shape make 8"),
    "half-a-byte": (safetensors_bytes({"a": entry([3], 0, 1, "F4")}, bytes(1)), "do not divide"),
    "three-offsets": (
        safetensors_bytes({"a": {**entry([1], 0, 4), "data_offsets": [0, 4, 8]}}),
        "not \\[begin, end\\]",
    ),
    "backwards": (safetensors_bytes({"a": entry([1], 4, 0)}, bytes(4)), "not \\[begin, end\\]"),
    "negative-offset": (safetensors_bytes({"a": entry([1], -4, 0)}, bytes(4)), "not \\[begin, end\\]"),
    "truncated": (safetensors_bytes({"a": entry([2], 0, 8)}, bytes(7)), "ends at byte .* truncated"),
    "overlap": (safetensors_bytes({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, bytes(12)), "'b' overlaps .*'a'"),
    "same-extent": (safetensors_bytes({"a": entry([1], 0, 4), "b": entry([1], 0, 4)}, bytes(4)), "overlaps"),
    "hole": (
        safetensors_bytes({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, bytes(12)),
        "4 bytes before tensor 'b'",
    ),
    "tail": (safetensors_bytes({"a": entry([1], 0, 4)}, bytes(5)), "1 bytes at its end"),
}


@pytest.mark.parametrize("case", BAD_SAFETENSORS)
def test_malformed_safetensors_are_refused(case: str, write: Callable[[str, bytes], Path]) -> None:
    data, reason = BAD_SAFETENSORS[case]
    path = write("model.safetensors", data)
    with pytest.raises(CheckpointError, match=reason) as caught:
        read_index(path)
    assert caught.value.path == path


# --- malformed GGUF --------------------------------------------------------------------------------------------------

ONE = gguf_tensor("a", [4], GGML_F32, 0)


def with_alignment(value_type: int, payload: bytes) -> bytes:
    return gguf_bytes([ONE], [gguf_entry("general.alignment", value_type, payload)], bytes(16))


BAD_GGUF: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "does not start with a GGUF header"),
    "magic": (b"GGML" + bytes(40), "does not start with a GGUF header"),
    "version-1": (gguf_bytes(version=1), "GGUF version 1"),
    "version-4": (gguf_bytes(version=4), "GGUF version 4"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is big-endian GGUF"),
    "many-tensors": (gguf_bytes(num_tensors=2**63), "claims 9223372036854775808 tensors"),
    "many-entries": (gguf_bytes(num_metadata=2**40), "claims 1099511627776 metadata entries"),
    "no-room": (gguf_bytes(num_metadata=1), "claims 1 metadata entries"),
    "cut-in-table": (gguf_bytes([ONE], num_tensors=2, data=bytes(8)), "claims 2 tensors|truncated"),
    "long-string": (gguf_bytes([], [struct.pack("<Q", 2**62) + b"abc" + bytes(64)], num_metadata=1), "truncated"),
    "bad-key": (gguf_bytes([], [gguf_string(b"\xff") + bytes(64)], num_metadata=1), "metadata key that is not UTF-8"),
    "bad-text": (gguf_bytes([], [gguf_entry("k", STRING, gguf_string(b"\xc3\x28"))]), "a value of 'k' that is not"),
    "value-type": (gguf_bytes([], [gguf_entry("k", 13, bytes(8))]), "unknown metadata type 13 in 'k'"),
    "item-type": (gguf_bytes([], [gguf_entry("k", ARRAY, struct.pack("<IQ", 77, 1) + bytes(8))]), "metadata type 77"),
    "truth": (gguf_bytes([], [gguf_entry("k", BOOL, b"\2")]), "neither 0 nor 1 in 'k'"),
    "long-array": (gguf_bytes([], [gguf_entry("k", ARRAY, struct.pack("<IQ", U8, 2**50))]), "more than a header may"),
    "array-past-end": (gguf_bytes([], [gguf_entry("k", ARRAY, struct.pack("<IQ", U64, 9000))]), "truncated"),
    "strings-past-end": (gguf_bytes([], [gguf_entry("k", ARRAY, struct.pack("<IQ", STRING, 90))]), "claims 90 strings"),
    "deep-array": (gguf_bytes([], [gguf_entry("k", ARRAY, struct.pack("<IQ", ARRAY, 1) * 9)]), "nested deeper than 4"),
    "duplicate-key": (gguf_bytes([], [gguf_entry("k", U8, b"\1")] * 2), "metadata key 'k' twice"),
    "alignment-0": (with_alignment(U32, struct.pack("<I", 0)), "alignment 0"),
    "alignment-48": (with_alignment(U32, struct.pack("<I", 48)), "alignment 48"),
    "alignment-huge": (with_alignment(U64, struct.pack("<Q", 2**40)), "alignment 1099511627776"),
    "alignment-float": (with_alignment(F32, struct.pack("<f", 32)), "alignment 32.0"),
    "alignment-bool": (with_alignment(BOOL, b"\1"), "alignment True"),
    "rank": (gguf_bytes([gguf_tensor("a", [1] * 5, GGML_F32, 0)], data=bytes(4)), "5 dimensions, the limit is 4"),
    "rank-huge": (gguf_bytes([gguf_string("a") + struct.pack("<I", 2**32 - 1) + bytes(64)]), "4294967295 dimensions"),
    "negative-dim": (gguf_bytes([gguf_tensor("a", [2**64 - 1], GGML_F32, 0)]), "impossible dimension"),
    "overflow": (gguf_bytes([gguf_tensor("a", [2**32, 2**32], GGML_F32, 0)]), "more numbers than fit"),
    "partial-block": (gguf_bytes([gguf_tensor("a", [48], GGML_Q4_1, 0)], data=bytes(64)), "rows of 48, which Q4_1"),
    "partial-rows": (gguf_bytes([gguf_tensor("a", [16, 2], GGML_Q4_1, 0)], data=bytes(64)), "rows of 16, which Q4_1"),
    "unknown-type": (gguf_bytes([gguf_tensor("a", [4], 1234, 0)], data=bytes(64)), "'a' has the unknown .*type 1234"),
    "retired-type": (gguf_bytes([gguf_tensor("a", [4], 4, 0)], data=bytes(64)), "retired ggml type 4"),
    "misaligned": (gguf_bytes([gguf_tensor("a", [4], GGML_F32, 16)], data=bytes(64)), "offset 16, not a multiple"),
    "offset-past-end": (gguf_bytes([gguf_tensor("a", [4], GGML_F32, 2**63)], data=bytes(64)), "truncated"),
    "truncated": (gguf_bytes([ONE], data=bytes(15)), "truncated"),
    "overlap": (gguf_bytes([gguf_tensor("b", [16], 0, 32), gguf_tensor("a", [16], 0, 0)], data=bytes(96)), "'b' over"),
    "duplicate": (gguf_bytes([ONE, gguf_tensor("a", [4], GGML_F32, 32)], data=bytes(64)), "tensor 'a' twice"),
    "split": (gguf_bytes([ONE], [gguf_entry("split.count", U8, b"\3")], bytes(16)), "one of 3 parts"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_GGUF)
def test_malformed_gguf_is_refused(case: str, write: Callable[[str, bytes], Path]) -> None:
    data, reason = BAD_GGUF[case]
    path = write("model.gguf", data)
    with pytest.raises(CheckpointError, match=reason) as caught:
        read_index(path)
    assert caught.value.path == path


def test_the_builders_build_valid_files(write: Callable[[str, bytes], Path]) -> None:
    # Otherwise each case above could be refused for a reason of the builder's own.
    valid = gguf_bytes([ONE, gguf_tensor("b", [32, 2], GGML_Q4_1, 32)], [gguf_entry("k", F64, bytes(8))], bytes(72))
    assert read_index(write("a.gguf", valid)).tensors["b"].nbytes == 40
    valid = gguf_bytes([ONE], [gguf_entry("k", U8, b"\1")], bytes(16), version=2)
    assert read_index(write("b.gguf", valid)).metadata == {"k": 1}
    valid = safetensors_bytes({"b": entry([1], 8, 12), "a": entry([2], 0, 8)}, bytes(12))
    assert list(read_index(write("c.safetensors", valid)).tensors) == ["b", "a"]


# --- folders ---------------------------------------------------------------------------------------------------------


def small(name: str = "a") -> bytes:
    return safetensors_bytes({name: entry([1], 0, 4)}, bytes(4))


def index_json(weight_map: Any, **more: Any) -> bytes:
    return json.dumps({"weight_map": weight_map, **more}).encode()


INDEX = "model.safetensors.index.json"
BAD_FOLDERS: dict[str, tuple[dict[str, bytes], str]] = {
    "empty": ({}, "no .safetensors and no .gguf"),
    "pickle": ({"pytorch_model.bin": b"x"}, "'pytorch_model.bin' must be converted"),
    "both": ({"m.gguf": gguf_bytes(), "model.safetensors": small()}, "both GGUF .*'m.gguf', 'model.safetensors'"),
    "two-gguf": ({"a.gguf": gguf_bytes(), "b.gguf": gguf_bytes()}, "several checkpoints.*'a.gguf', 'b.gguf'"),
    "two-safetensors": ({"a.safetensors": small(), "b.safetensors": small()}, "several safetensors files"),
    "two-indexes": ({INDEX: b"", "model.fp16.safetensors.index.json": b""}, "several checkpoints"),
    "single-and-index": ({INDEX: b"", "model.safetensors": small()}, "both model.safetensors and"),
    "shards-without-index": ({"model-00001-of-00002.safetensors": small()}, "shards but no"),
    "index-not-json": ({INDEX: b"["}, "no valid JSON"),
    "index-empty": ({INDEX: b"{}"}, "no weight_map"),
    "index-duplicate": ({INDEX: b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}'}, "names 'a' twice"),
    "index-metadata": ({INDEX: index_json({"a": "s.safetensors"}, metadata=[])}, "metadata that is not an object"),
    "missing-shard": ({INDEX: index_json({"a": "gone.safetensors"})}, "names the shard gone.safetensors"),
    "missing-tensor": (
        {INDEX: index_json({"a": "s.safetensors", "b": "s.safetensors"}), "s.safetensors": small()},
        "says 'b' is in s.safetensors, but it is not",
    ),
    "wrong-shard": (
        {INDEX: index_json({"a": "t.safetensors", "b": "s.safetensors"}), "s.safetensors": small("a"),
         "t.safetensors": small("b")},
        "says 'a' is in t.safetensors, but it is not",
    ),
    "tensor-twice": (
        {INDEX: index_json({"a": "s.safetensors", "b": "t.safetensors"}), "s.safetensors": small("a"),
         "t.safetensors": safetensors_bytes({"a": entry([1], 0, 4), "b": entry([1], 4, 8)}, bytes(8))},
        "holds 'a', and so does",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_folders_that_hold_no_one_checkpoint_are_refused(case: str, tmp_path: Path) -> None:
    files, reason = BAD_FOLDERS[case]
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=reason):
        read_index(tmp_path)


@pytest.mark.parametrize(
    "shard",
    ["../x.safetensors", "/x.safetensors", "a/x.safetensors", "..", "", ".x.safetensors", "x.bin", "x\0.safetensors",
     "a\\x.safetensors", "C:x.safetensors", 7, None],
)  # fmt: skip
def test_a_weight_map_cannot_lead_out_of_its_folder(shard: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "x.safetensors").write_bytes(small())
    (folder / INDEX).write_bytes(index_json({"a": shard}))
    with pytest.raises(CheckpointError, match=r"not the plain name of a \.safetensors file"):
        read_index(folder)


@pytest.mark.parametrize("names", [["model.safetensors", "adapter_model.safetensors"], ["only.safetensors"]])
def test_the_obvious_file_of_a_folder_is_taken(names: list[str], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_bytes(small())
    assert read_index(tmp_path).tensors["a"].path.name == names[0]


def test_a_link_into_a_blob_store_is_followed(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(small())
    (tmp_path / "model.safetensors").symlink_to("blob")
    assert read_index(tmp_path).tensors["a"].nbytes == 4


def test_what_is_not_a_checkpoint_file(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(small())
    os.mkfifo(tmp_path / "fifo.gguf")
    for name, reason in {
        "gone.gguf": "cannot be opened", "model.bin": "is not a checkpoint", "fifo.gguf": "not a regular file",
        "nul\0.gguf": "cannot be opened", "x" * 300: "cannot be",
    }.items():  # fmt: skip
        with pytest.raises(CheckpointError, match=reason):
            read_index(tmp_path / name)


def test_a_long_hostile_name_does_not_fill_the_message(write: Callable[[str, bytes], Path]) -> None:
    path = write("model.safetensors", safetensors_bytes({"x\n" * 100_000: entry([1], 0, 3)}, bytes(3)))
    with pytest.raises(CheckpointError) as caught:
        read_index(path)
    assert len(caught.value.reason) < 300
    assert "\n" not in caught.value.reason


# --- identity --------------------------------------------------------------------------------------------------------


def test_verify_tells_what_happened_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"

    def fresh() -> CheckpointIndex:
        path.write_bytes(small())
        index = read_index(path)
        index.verify()
        return index

    index = fresh()
    os.truncate(path, 20)
    with pytest.raises(CheckpointError, match=r"was truncated since it was read: \d+ bytes then, 20 now"):
        index.verify()
    index = fresh()
    with path.open("ab") as file:
        file.write(b"x")
    with pytest.raises(CheckpointError, match="has grown"):
        index.verify()
    index = fresh()
    os.utime(path, ns=(0, 1))
    with pytest.raises(CheckpointError, match="was modified"):
        index.verify()
    index = fresh()
    (tmp_path / "other").write_bytes(small())
    os.replace(tmp_path / "other", path)
    with pytest.raises(CheckpointError, match="was replaced"):
        index.verify()
    index = fresh()
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be found any more"):
        index.verify()


def test_identity_is_the_same_by_path_and_by_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    with path.open("rb") as file:
        assert FileIdentity.of(path) == FileIdentity.of(file.fileno())
    assert FileIdentity.of(path).nbytes == 3


@pytest.mark.usefixtures("no_leaks")
def test_no_descriptor_is_left_open_by_refused_files(write: Callable[[str, bytes], Path]) -> None:
    path = write("model.gguf", BAD_GGUF["truncated"][0])
    for _ in range(3):
        with pytest.raises(CheckpointError):
            read_index(path)
