"""From what the user said to a path on this machine: an existing path, or the hub's cache of an id."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from hetero.io.errors import ConfigError
from hetero.sources.skeleton import first_line

_NAME = r"[A-Za-z0-9_](?:[\w.-]*\w)?"  # what the hub takes; "./model" is a path
_ID = re.compile(rf"{_NAME}(/{_NAME})?")
_GGUF_ID = re.compile(rf"({_NAME}/{_NAME})/(.+\.gguf)")
_SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "chat_templates/*"]
_MODEL_FILES = (".gguf", ".safetensors", ".json")  # the last one: an index of several .safetensors files
_INDEX = "model.safetensors.index.json"


def locate(path_or_id: str | os.PathLike[str], *, revision: str | None, trust_remote_code: bool) -> Path:
    """Return an existing path as it is, else download what a hub id needs (or find it in the cache).

    `owner/name` is a repository of safetensors, `owner/name/file.gguf` one file of a repository.
    """
    path = Path(path_or_id).expanduser()
    text = os.fspath(path_or_id)
    if text and path.exists():  # Path("") is the current folder
        if path.is_file() and path.suffix not in _MODEL_FILES:
            raise ConfigError(
                f"{text!r} is no model: give a checkpoint folder, a .gguf or .safetensors file, or a hub id"
            )
        return path
    gguf = _GGUF_ID.fullmatch(text)
    if path.suffix in (".gguf", ".safetensors") and not gguf:
        raise ConfigError(f"the file {text!r} does not exist (looked for it in {Path.cwd()})")
    if path.is_absolute() or not (gguf or _ID.fullmatch(text)):
        raise ConfigError(f"{text!r} does not exist, and is not a hub id (owner/name) either")
    try:
        from huggingface_hub import hf_hub_download

        if gguf:
            return Path(hf_hub_download(gguf[1], gguf[2], revision=revision))
        return _snapshot(text, revision=revision, code=trust_remote_code)
    except ImportError as error:
        raise ConfigError(f"{text!r} does not exist; for hub ids install hetero[hf]") from error
    except (OSError, ValueError) as error:  # the hub client's errors derive from these
        from huggingface_hub.constants import HF_HUB_OFFLINE
        from huggingface_hub.errors import LocalEntryNotFoundError

        is_offline = HF_HUB_OFFLINE and isinstance(error, LocalEntryNotFoundError)
        reason = "HF_HUB_OFFLINE is set" if is_offline else first_line(error)
        raise ConfigError(
            f"{text!r} is neither an existing path nor a model in the hub cache, and was not downloaded: {reason}"
        ) from error


def _snapshot(repo_id: str, *, revision: str | None, code: bool) -> Path:
    """Fetch the small files, then exactly the weight files the index names (other copies may lie beside them)."""
    from huggingface_hub import snapshot_download

    def fetch(patterns: list[str]) -> Path:
        options: dict[str, Any] = {"revision": revision, "allow_patterns": patterns}
        return Path(snapshot_download(repo_id, **options))

    folder = fetch(_SMALL_FILES + (["*.py"] if code else []))
    if (folder / _INDEX).is_file():
        weight_map = json.loads((folder / _INDEX).read_text(encoding="utf-8")).get("weight_map", {})
        return fetch(sorted(set(weight_map.values())))
    return fetch(["model.safetensors"])
