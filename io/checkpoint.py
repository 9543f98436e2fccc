"""The checkpoint index: tensor name -> extent, format and shape, from headers alone.

Everything a file says is checked here, once, so that the layers above may trust an extent: it lies inside its file,
it overlaps no other, and its length is what its format and shape need. What does not hold is refused with
CheckpointError (file, reason); no other exception comes out of `read_index`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hetero.io.errors import CheckpointError
from hetero.io.gguf import read_gguf
from hetero.io.safetensors_header import read_safetensors, read_weight_map
from hetero.io.tensor_info import FORMAT_BLOCKS, FileIdentity, HeaderFile, TensorInfo, short

__all__ = ["FORMAT_BLOCKS", "CheckpointIndex", "FileIdentity", "TensorInfo", "read_index"]

_INDEX_SUFFIX = ".safetensors.index.json"
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.safetensors$")


@dataclass(frozen=True, slots=True)
class CheckpointIndex:
    """All tensors of one checkpoint, and the identity of each of its files when it was read."""

    path: Path
    """What was asked for: a file or a folder."""
    kind: Literal["safetensors", "gguf"]
    tensors: dict[str, TensorInfo]
    metadata: dict[str, Any]
    files: dict[Path, FileIdentity]

    def verify(self) -> None:
        """Raise CheckpointError if a file is gone, truncated, replaced or modified since it was read."""
        for path, identity in self.files.items():
            try:
                now = FileIdentity.of(path)
            except OSError as error:
                raise CheckpointError(path, f"cannot be found any more: {error.strerror}") from error
            difference = identity.difference(now)
            if difference is not None:
                raise CheckpointError(path, f"{difference}; load it again")


def read_index(path: str | os.PathLike[str]) -> CheckpointIndex:
    """Read the headers of a checkpoint. Blocks on small reads; raises CheckpointError and nothing else.

    `path` is a `.safetensors` or `.gguf` file, a `*.safetensors.index.json`, or a folder that holds exactly one
    checkpoint: one `.gguf`, one `.safetensors`, or shards with their index.
    """
    path = Path(path)
    try:
        path = path.absolute()  # an extent must stay good when the working directory changes
        is_folder = path.is_dir()
        entries = sorted(os.listdir(path)) if is_folder else []
    except (OSError, ValueError) as error:
        raise CheckpointError(path, f"cannot be listed: {error}") from error
    chosen = path / _choose(path, entries) if is_folder else path
    if chosen.name.endswith(_INDEX_SUFFIX):
        return _read_sharded(path, chosen)
    with HeaderFile(chosen) as file:
        if chosen.suffix == ".safetensors":
            tensors, metadata = read_safetensors(file)
            kind: Literal["safetensors", "gguf"] = "safetensors"
        elif chosen.suffix == ".gguf":
            tensors, metadata = read_gguf(file)
            kind = "gguf"
            _refuse_split(file, metadata)
        else:
            raise file.malformed("is not a checkpoint: a .safetensors or .gguf file, or a folder with one, is needed")
        return CheckpointIndex(path, kind, {t.name: t for t in tensors}, metadata, {chosen: file.identity})


def _choose(folder: Path, names: list[str]) -> str:
    """The one file in `folder` to read first. A choice that is not obvious is the caller's: refused with the names."""
    ggufs = [name for name in names if name.endswith(".gguf")]
    indexes = [name for name in names if name.endswith(_INDEX_SUFFIX)]
    singles = [name for name in names if name.endswith(".safetensors")]
    if ggufs and (indexes or singles):
        raise CheckpointError(
            folder, f"holds both GGUF and safetensors files; give the one meant: {_list([*ggufs, *indexes, *singles])}"
        )
    if len(ggufs) > 1 or len(indexes) > 1:
        raise CheckpointError(folder, f"holds several checkpoints; give the one meant: {_list(ggufs or indexes)}")
    if indexes and "model.safetensors" in singles:
        raise CheckpointError(folder, f"holds both model.safetensors and {indexes[0]}; give the one meant")
    if ggufs or indexes:
        return (ggufs or indexes)[0]
    if "model.safetensors" in singles:
        return "model.safetensors"
    if any(_SHARD.search(name) for name in singles):
        raise CheckpointError(folder, f"holds shards but no *{_INDEX_SUFFIX}: {_list(singles)}")
    if len(singles) > 1:
        raise CheckpointError(folder, f"holds several safetensors files; give the one meant: {_list(singles)}")
    if singles:
        return singles[0]
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
    remedy = f"; {_list(pickles)} must be converted to safetensors first" if pickles else ""
    raise CheckpointError(folder, f"holds no .safetensors and no .gguf file{remedy}")


def _list(names: list[str]) -> str:
    return ", ".join(short(name) for name in names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _read_sharded(asked: Path, index_path: Path) -> CheckpointIndex:
    with HeaderFile(index_path) as file:
        weight_map, index_metadata = read_weight_map(file)
        files = {index_path: file.identity}
    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, Any] = {}
    for shard in sorted(set(weight_map.values())):
        if not (index_path.parent / shard).exists():
            raise CheckpointError(index_path, f"names the shard {shard}, which is not there")
        with HeaderFile(index_path.parent / shard) as file:
            shard_tensors, shard_metadata = read_safetensors(file)
            files[file.path] = file.identity
        metadata |= shard_metadata
        for tensor in shard_tensors:
            # A tensor the index does not list is kept: transformers loads whatever the listed shards hold.
            if tensor.name in tensors:
                raise CheckpointError(file.path, f"holds {short(tensor.name)}, and so does {tensors[tensor.name].path}")
            tensors[tensor.name] = tensor
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].path.name != shard:
            raise CheckpointError(index_path, f"says {short(name)} is in {shard}, but it is not")
    return CheckpointIndex(asked, "safetensors", tensors, metadata | index_metadata, files)


def _refuse_split(file: HeaderFile, metadata: dict[str, Any]) -> None:
    parts = metadata.get("split.count", 0)
    if parts not in (0, 1):
        raise file.malformed(f"is one of {short(parts)} parts of a split GGUF; merge them first (llama-gguf-split)")
