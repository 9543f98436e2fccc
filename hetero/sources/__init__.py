"""From a path or a hub id to a model skeleton and the place of every parameter's bytes.

transformers is imported only when a source is opened.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from hetero.sources.source import ParamSource, Piece, Source

if TYPE_CHECKING:
    import torch

__all__ = ["ParamSource", "Piece", "Source", "open_source"]


def open_source(
    path_or_id: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Source:
    """Open a model from headers alone: a folder, a .safetensors or .gguf file, or a hub id.

    A hub id is downloaded into the hub's own cache if it is not there yet and HF_HUB_OFFLINE is not set (this blocks);
    `revision` is for hub ids only. `dtype` is what the model computes in.
    Raises ConfigError, CheckpointError or UnsupportedError, each in one line.
    """
    from hetero.sources.gguf import open_gguf
    from hetero.sources.hub import locate
    from hetero.sources.huggingface import open_huggingface

    path = locate(path_or_id, revision=revision, trust_remote_code=trust_remote_code)
    if _is_gguf(path):
        return open_gguf(path, dtype=dtype)
    return open_huggingface(path, dtype=dtype, trust_remote_code=trust_remote_code)


def _is_gguf(path: Path) -> bool:
    """A .gguf file, or a folder with GGUF files and no safetensors config beside them."""
    if path.is_dir():
        return any(path.glob("*.gguf")) and not any(path.glob("*.safetensors"))
    return path.suffix == ".gguf"
