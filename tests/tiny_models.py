"""Tiny random checkpoints, written to a folder the way transformers writes them."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetero.sources import ParamSource

VOCAB = 320
PLAIN_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8}

_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MOE: dict[str, Any] = {"moe_intermediate_size": 96, "num_experts_per_tok": 2}
_GPT2: dict[str, Any] = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256}

# family -> (config class, its arguments)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _SMALL),
    "mistral": ("MistralConfig", {**_SMALL, "sliding_window": 16}),
    "qwen2": ("Qwen2Config", _SMALL),
    "qwen3": ("Qwen3Config", _SMALL),
    "gemma2": ("Gemma2Config", {**_SMALL, "sliding_window": 16, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3TextConfig", {**_SMALL, "sliding_window": 16, "query_pre_attn_scalar": 16}),
    "phi3": ("Phi3Config", _SMALL),
    "gpt2": ("GPT2Config", {**_GPT2, "bos_token_id": 1, "eos_token_id": 2}),
    "gpt_neox": ("GPTNeoXConfig", _SMALL),
    "opt": ("OPTConfig", {**_SMALL, "ffn_dim": 128, "word_embed_proj_dim": 64}),
    "mixtral": ("MixtralConfig", {**_SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": ("OlmoeConfig", {**_SMALL, "num_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3MoeConfig", {**_SMALL, **_MOE, "num_experts": 4}),
    # Keeps its router in float32, with a persistent buffer.
    "dots1": (
        "Dots1Config",
        {**_SMALL, **_MOE, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    ),
    "qwen2_moe": ("Qwen2MoeConfig", {**_SMALL, **_MOE, "num_experts": 4, "shared_expert_intermediate_size": 80}),
}


def tiny_model(family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any) -> Any:
    """Build a model of a few hundred kB with every parameter random, norms and biases included."""
    import transformers

    class_name, arguments = FAMILIES[family]
    config = getattr(transformers, class_name)(**{**arguments, **overrides})
    torch.manual_seed(seed)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    model.eval()
    with torch.no_grad():
        buffers = [b for name, b in model.named_buffers() if name in model.state_dict()]
        for param in [*model.parameters(), *buffers]:
            # Initialisers leave norms at one and biases at zero, where a mixed-up name would not show.
            param.add_(torch.randn(param.shape).to(param.dtype) * (0.05 if param.dim() > 1 else 0.2))
    return model


def write_checkpoint(
    folder: Path,
    family: str,
    *,
    dtype: torch.dtype = torch.float32,
    tied: bool | None = None,
    max_shard_size: str | None = None,
    base_only: bool = False,
    misaligned: bool = False,
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """Write a tiny checkpoint and return its folder.

    `tied` overrides the family's default. `max_shard_size` ("200KB") writes shards with an index. `base_only` saves the
    model without its head. `misaligned` puts every tensor at 8 modulo 16 in its file, otherwise all lie at 0 modulo 16
    (transformers leaves it to chance). More keyword arguments go to the config.
    """
    if tied is not None:
        overrides["tie_word_embeddings"] = tied
    model = tiny_model(family, dtype=dtype, seed=seed, **overrides)
    saved = model.base_model if base_only else model
    saved.save_pretrained(folder, **({} if max_shard_size is None else {"max_shard_size": max_shard_size}))
    for path in folder.glob("*.safetensors"):
        shift_data(path, 8 if misaligned else 0)
    return folder


def shift_data(path: Path, residue: int) -> None:
    """Rewrite a safetensors file so that its data starts at `residue` (a multiple of 8) modulo 16."""
    content = path.read_bytes()
    (header_nbytes,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + header_nbytes])
    data = content[8 + header_nbytes :]
    header.setdefault("__metadata__", {})["note"] = "shifted"
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if (8 + len(text)) % 16 != residue:
        text += b" " * 8
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def param_values(source: ParamSource) -> torch.Tensor:
    """Read and decode one parameter the plain way: whole, in float32 where the file is packed."""
    content = bytearray(source.nbytes)
    for piece in source.pieces:
        with open(piece.tensor.path, "rb") as file:
            file.seek(piece.tensor.offset)
            content[piece.dst_offset : piece.dst_offset + piece.tensor.nbytes] = file.read(piece.tensor.nbytes)
    shape = source.shape[::-1] if source.transform == "transpose" else source.shape
    if source.format in PLAIN_DTYPES:
        values = torch.frombuffer(content, dtype=PLAIN_DTYPES[source.format]).reshape(shape)
    else:
        import gguf

        packed = np.frombuffer(content, dtype=np.uint8).reshape(math.prod(shape[:-1]), -1)
        kind = gguf.GGMLQuantizationType[source.format]
        values = torch.from_numpy(gguf.quants.dequantize(packed, kind)).reshape(shape)
    if source.row_permutation is not None:
        num_heads, head_dim = source.row_permutation
        pairs = values.reshape(num_heads, head_dim // 2, 2, *values.shape[1:])
        values = pairs.transpose(1, 2).reshape(values.shape)
    if source.transform == "minus_one":
        values = values.float() - 1
    return values.T if source.transform == "transpose" else values


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a single-file checkpoint."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
