"""Whole checkpoints into arrays: the right bytes from any layout, memory that lives as long as it is used."""

from __future__ import annotations

import errno
import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import hetero.io.load
from hetero.io.arena import Arena
from hetero.io.backends.faulty import Fault, FaultyBackend
from hetero.io.checkpoint import read_index
from hetero.io.engine import Engine
from hetero.io.errors import CheckpointError, IOEngineError
from hetero.io.load import load_arrays

Bytes = npt.NDArray[np.uint8]


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(backend="threads", block_nbytes=64 << 10) as engine:
        yield engine


@pytest.fixture
def small_extents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hetero.io.load, "_EXTENT_NBYTES", 10_000)
    monkeypatch.setattr(hetero.io.load, "_MAX_HOLE_NBYTES", 100)


def write_safetensors(path: Path, tensors: dict[str, Bytes]) -> None:
    header, end = {}, 0
    for name, array in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(array)], "data_offsets": [end, end + len(array)]}
        end += len(array)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(a.tobytes() for a in tensors.values()))


def random_tensors(*sizes: int, prefix: str = "t") -> dict[str, Bytes]:
    rng = np.random.default_rng(len(sizes))
    return {f"{prefix}{i}": rng.integers(1, 256, size, np.uint8) for i, size in enumerate(sizes)}


SIZES = {
    "one-byte": (1,),
    "none-aligned": (5, 4097, 12_345, 1, 8191),
    "with-an-empty-one": (100, 0, 200),
    "larger-than-an-extent": (50_000, 3, 200_001),
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.usefixtures("small_extents")
def test_every_tensor_has_its_own_bytes(tmp_path: Path, engine: Engine, sizes: tuple[int, ...]) -> None:
    tensors = random_tensors(*sizes)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    arrays = load_arrays(engine, read_index(tmp_path))
    assert list(arrays) == list(tensors)
    for name, expected in tensors.items():
        assert np.array_equal(arrays[name], expected)


def test_shards_are_read_from_their_own_files(tmp_path: Path, engine: Engine) -> None:
    shards = {"a.safetensors": random_tensors(9000, 7, prefix="a"), "b.safetensors": random_tensors(5, prefix="b")}
    for file, tensors in shards.items():
        write_safetensors(tmp_path / file, tensors)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    arrays = load_arrays(engine, read_index(tmp_path))
    for tensors in shards.values():
        for name, expected in tensors.items():
            assert np.array_equal(arrays[name], expected)


@pytest.mark.usefixtures("small_extents")
def test_only_wanted_tensors_are_read_in_the_order_asked(tmp_path: Path, engine: Engine) -> None:
    tensors = random_tensors(300_000, 8000, 300_000, 90, 300_000)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    arrays = load_arrays(engine, read_index(tmp_path), ["t3", "t1"])
    assert list(arrays) == ["t3", "t1"]
    assert np.array_equal(arrays["t3"], tensors["t3"]) and np.array_equal(arrays["t1"], tensors["t1"])
    assert engine.stats().read_nbytes < 40_000


@pytest.mark.usefixtures("small_extents")
def test_an_array_outlives_the_engine_and_frees_its_arena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = random_tensors(9000, 9000)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    mapped: list[range] = []

    def remember(nbytes: int, *, name: str) -> Arena:
        arena = Arena(nbytes, name=name)
        mapped.append(range(arena.address, arena.address + arena.nbytes))
        return arena

    monkeypatch.setattr(hetero.io.load, "Arena", remember)
    with Engine(backend="threads") as engine:
        arrays = load_arrays(engine, read_index(tmp_path))
    kept = arrays.pop("t1")
    arrays.clear()
    gc.collect()
    assert np.array_equal(kept, tensors["t1"])
    assert [is_mapped(addresses) for addresses in mapped] == [False, True]


def is_mapped(addresses: range) -> bool:
    """Whether a mapping of this process starts there: an arena is one of its own."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return any(int(line.split("-", 1)[0], 16) == addresses.start for line in lines)


def test_a_file_replaced_since_it_was_indexed_is_refused(tmp_path: Path, engine: Engine) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, random_tensors(100))
    index = read_index(path)
    write_safetensors(tmp_path / "new", random_tensors(100))
    os.replace(tmp_path / "new", path)
    with pytest.raises(CheckpointError, match="replaced"):
        load_arrays(engine, index)


@pytest.mark.usefixtures("small_extents")
def test_an_error_waits_for_what_is_in_flight_and_closes_the_files(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", random_tensors(9000, 9000, 9000))
    faults = iter([Fault(error=errno.EIO), Fault(delay_s=0.2)])
    with Engine(backend="threads", wrap_backend=lambda inner: FaultyBackend(inner, lambda _: next(faults, None))) as e:
        with pytest.raises(IOEngineError, match=r"model\.safetensors"):
            load_arrays(e, read_index(tmp_path))
        assert e.stats().in_flight == 0
        assert not any("model.safetensors" in os.readlink(fd) for fd in descriptors())


def descriptors() -> list[Path]:
    return [fd for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
