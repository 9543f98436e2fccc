"""Tiny random models as GGUF files, written with the gguf package the way llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from tests.tiny_models import VOCAB, tiny_model

Array = npt.NDArray[Any]

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SAMPLE = "the quick brown fox jumps over the lazy dog and then the other dogs do not jump at all; 12345 is a number. "

# family -> (architecture in the file, the kind of vocabulary, its pre-tokenizer)
ARCHITECTURES = {
    "llama": ("llama", "gpt2", "smollm"),
    "qwen2": ("qwen2", "gpt2", "qwen2"),
    "qwen3": ("qwen3", "gpt2", "qwen2"),
    "qwen3_moe": ("qwen3moe", "gpt2", "qwen2"),
    "gemma2": ("gemma2", "llama", "default"),
    "gemma3": ("gemma3", "llama", "default"),
    "phi3": ("phi3", "llama", "default"),
    "gpt2": ("gpt2", "gpt2", "gpt-2"),
}


def write_gguf(
    path: Path,
    family: str,
    *,
    quantization: str = "F32",
    name: str = "Tiny",
    seed: int = 0,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, Array] | None = None,
    **overrides: Any,
) -> Path:
    """Write a tiny model and return the path. Matrices are `quantization`, vectors F32.

    `metadata` and `tensors` are added (None as a value of `metadata` leaves a key out); `overrides` go to the config.
    """
    model = tiny_model(family, seed=seed, **overrides)
    architecture, vocabulary, pre_tokenizer = ARCHITECTURES[family]
    entries = {**_hyperparameters(model.config, architecture), **_tokenizer(vocabulary, pre_tokenizer)}
    entries |= {"general.name": name, **(metadata or {})}
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in entries.items():
        if value is not None:
            _add(writer, key, value)
    kind = gguf.GGMLQuantizationType[quantization]
    stored = {**dict(_tensors(model, family, architecture)), **(tensors or {})}
    for tensor_name, values in stored.items():
        if values.ndim < 2 or "ffn_gate_inp" in tensor_name:
            writer.add_tensor(tensor_name, values)
        else:
            writer.add_tensor(tensor_name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _hyperparameters(config: Any, architecture: str) -> dict[str, Any]:
    if architecture == "gpt2":
        values: dict[str, Any] = {
            "context_length": config.n_positions,
            "embedding_length": config.n_embd,
            "feed_forward_length": config.n_inner or 4 * config.n_embd,
            "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        }
    else:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        values = {
            "context_length": config.max_position_embeddings,
            "embedding_length": config.hidden_size,
            "feed_forward_length": config.intermediate_size,
            "attention.head_count_kv": config.num_key_value_heads,
            "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
            "attention.key_length": head_dim,
            "attention.value_length": head_dim,
            "rope.dimension_count": head_dim,
            "rope.freq_base": 10000.0,
        }
    values |= {"block_count": config.num_hidden_layers, "attention.head_count": config.num_attention_heads}
    if architecture.startswith("gemma"):
        values["attention.sliding_window"] = config.sliding_window
    if architecture == "qwen3moe":
        values["expert_count"] = config.num_experts
        values["expert_used_count"] = config.num_experts_per_tok
        values["expert_feed_forward_length"] = config.moe_intermediate_size
    return {f"{architecture}.{key}": value for key, value in values.items()}


def _tensors(model: Any, family: str, architecture: str) -> Iterator[tuple[str, Array]]:
    config = model.config
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, param in model.named_parameters():  # a tied head is not written
        values = param.detach().numpy()
        if name.endswith("gate_up_proj") and values.ndim == 3:
            layer = name.split(".")[2]
            gate, up = np.split(values, 2, axis=1)
            yield f"blk.{layer}.ffn_gate_exps.weight", np.ascontiguousarray(gate)
            yield f"blk.{layer}.ffn_up_exps.weight", np.ascontiguousarray(up)
            continue
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored is None:
            raise AssertionError(f"the gguf package has no name for {name}")
        if stored.endswith("_exps"):
            stored += ".weight"
        if architecture == "llama" and ".attn_q." in stored:
            values = _rotary_order(values, config.num_attention_heads)
        if architecture == "llama" and ".attn_k." in stored:
            values = _rotary_order(values, config.num_key_value_heads)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        if architecture == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            values = np.ascontiguousarray(values.T)
        yield stored, values


def _rotary_order(values: Array, num_heads: int) -> Array:
    """LlamaModel.permute of llama.cpp's converter."""
    halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def _tokenizer(vocabulary: str, pre_tokenizer: str) -> dict[str, Any]:
    tokens, types, extra = _byte_level() if vocabulary == "gpt2" else _sentencepiece()
    values = {
        "model": vocabulary,
        "pre": pre_tokenizer,
        "tokens": tokens,
        "token_type": types,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "padding_token_id": 0,
        **extra,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()} | {
        "tokenizer.chat_template": CHAT_TEMPLATE
    }


def _byte_level() -> tuple[list[str], list[int], dict[str, Any]]:
    """A byte-level BPE trained on the sample, padded to VOCAB tokens."""
    import json

    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<|pad|>", "<|bos|>", "<|eos|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([SAMPLE] * 4, trainer)
    merges = [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    tokens += [f"[unused{i}]" for i in range(VOCAB - len(tokens))]
    return tokens, [3 if token in special else 1 for token in tokens], {"merges": merges}


def _sentencepiece() -> tuple[list[str], list[int], dict[str, Any]]:
    """A sentencepiece vocabulary with byte fallback: special tokens, bytes, letters, and pieces of the sample."""
    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz"]
    pieces = ["th", "the", "▁the", "▁th", "er", "og", "▁d", "▁dog", "ow", "um", "ump", "▁t", "▁a", "he", "an", "▁o"]
    tokens = [*special, *fallback, *letters, *pieces]
    tokens += [f"[unused{i}]" for i in range(VOCAB - len(tokens))]
    types = [3, 3, 3, 2] + [6] * 256 + [1] * (len(tokens) - 260)
    scores = [0.0] * 260 + [-float(i) for i in range(len(tokens) - 260)]
    return tokens, types, {"scores": scores, "unknown_token_id": 3, "add_bos_token": True}
