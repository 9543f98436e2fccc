"""A transformers config from a GGUF header.

The key names are transformers' own tables (`GGUF_CONFIG_MAPPING`); its loader itself wants a GGUFReader, which maps
the whole header into Python objects for seconds. Where the file says something that the tables leave out, and the
config class would silently take one checkpoint's default, the file wins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hetero.io.checkpoint import CheckpointIndex, TensorInfo
from hetero.io.errors import CheckpointError, ConfigError, UnsupportedError
from hetero.sources.gguf_names import ARCHITECTURES
from hetero.sources.skeleton import first_line

_MODEL_TYPES = {"qwen3moe": "qwen3_moe", "gemma3": "gemma3_text"}
_TABLES = {"qwen3moe": "qwen3_moe"}
# Missing from transformers' tables, but decided by the file: architecture -> key -> config name.
_ALSO: dict[str, dict[str, str]] = {
    "qwen3": {"attention.key_length": "head_dim"},
    "qwen3moe": {"expert_feed_forward_length": "moe_intermediate_size"},
    "gemma2": {
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    "gpt2": {"context_length": "n_positions", "feed_forward_length": "n_inner"},
}
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192  # of every published Llama 3


def architecture_of(index: CheckpointIndex) -> str:
    """The file's architecture. Raises UnsupportedError, with the known ones, for any other."""
    architecture = index.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedError(
            f"{index.path}: GGUF architecture {architecture!r} is not supported (known: {known}); "
            "use the model's safetensors"
        )
    return str(architecture)


def make_config(index: CheckpointIndex, architecture: str) -> Any:
    """Build the config. Raises ConfigError, CheckpointError or UnsupportedError for what cannot be represented."""
    from transformers import CONFIG_MAPPING

    values = _values(index.metadata, architecture, index.tensors)
    values |= _rope(index, architecture, values)
    if index.metadata.get(f"{architecture}.expert_count") and architecture == "llama":
        raise UnsupportedError(
            f"{index.path}: a mixture of experts in llama's GGUF layout; use the model's safetensors"
        )
    model_type = values.pop("model_type")
    try:
        config = CONFIG_MAPPING[model_type].from_dict(values)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{index.path}: its header makes no {model_type} config: {first_line(error)}") from error
    config.name_or_path = str(index.path if index.path.is_dir() else index.path.parent)
    return config


def _values(metadata: Mapping[str, Any], architecture: str, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING

    model_type = _MODEL_TYPES.get(architecture, architecture)
    table = _TABLES.get(architecture, architecture)
    mapping: dict[str, dict[str, str | None]] = dict(GGUF_CONFIG_MAPPING)  # type: ignore[arg-type]
    names = {f"{architecture}.{key}": name for key, name in mapping[table].items()}
    names |= {f"tokenizer.{key}": name for key, name in mapping["tokenizer"].items()}
    names |= {f"{architecture}.{key}": name for key, name in _ALSO.get(architecture, {}).items()}
    values: dict[str, Any] = dict(GGUF_CONFIG_DEFAULTS_MAPPING.get(table, {}))
    values |= {name: metadata[key] for key, name in names.items() if name is not None and key in metadata}
    values["model_type"] = model_type
    values["tie_word_embeddings"] = "output.weight" not in tensors
    if "vocab_size" not in values and "tokenizer.ggml.tokens" in metadata:
        values["vocab_size"] = len(metadata["tokenizer.ggml.tokens"])
    if architecture == "gemma2" and values.get("num_hidden_layers") == 46:
        # The 27B scales queries by its width per head, not by the head's; no key says so (llama.cpp knows it too).
        values["query_pre_attn_scalar"] = values["hidden_size"] // values["num_attention_heads"]
    return values


def _rope(index: CheckpointIndex, architecture: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Frequencies that are not plain: transformers' GGUF loader drops them, which changes the text."""
    kind = index.metadata.get(f"{architecture}.rope.scaling.type", "none")
    factor = index.metadata.get(f"{architecture}.rope.scaling.factor", 1.0)
    if "rope_freqs.weight" in index.tensors:
        return _llama3(index.path, index.tensors["rope_freqs.weight"], values)
    scaled = kind not in ("none", "") and not (kind == "linear" and factor == 1.0)
    if scaled and kind == "linear" and architecture != "gemma3":
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    if scaled or any(name.startswith("rope_factors_") for name in index.tensors):
        what = kind if scaled else "longrope"
        raise UnsupportedError(f"{index.path}: rotary scaling {what!r} cannot be read from GGUF; use the safetensors")
    return {}


def _llama3(path: Path, tensor: TensorInfo, values: Mapping[str, Any]) -> dict[str, Any]:
    """Llama 3's frequency factors are stored as numbers; find the parameters that make exactly these."""
    head_dim = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    if tensor.format != "F32" or tensor.shape != (head_dim // 2,):
        raise CheckpointError(
            path, f"{tensor.name} is {tensor.format} {tensor.shape}, F32 ({head_dim // 2},) was expected"
        )
    with open(tensor.path, "rb") as file:
        file.seek(tensor.offset)
        stored = np.frombuffer(file.read(tensor.nbytes), dtype="<f4")
    factor = float(stored.max())
    wavelengths = 2 * math.pi * values.get("rope_theta", 10000.0) ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (_LLAMA3_CONTEXT / wavelengths - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    expected = 1 / ((1 - smooth.clip(0, 1)) / factor + smooth.clip(0, 1))
    if not np.allclose(stored, expected, rtol=1e-4):
        raise UnsupportedError(f"{path}: its rotary factors are not Llama 3's; use the model's safetensors")
    if factor == 1.0:
        return {}
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }
    return {"rope_scaling": scaling}
