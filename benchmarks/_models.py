"""Models that only benchmarks need: Llama-shaped, random from a seed, as sharded safetensors and as a BF16 GGUF.

As a script, `python benchmarks/_models.py FOLDER` makes what is missing; the memory it takes is gone when it ends.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

GGUF_NAME = "model-bf16.gguf"
SHARD_NBYTES = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """The sizes of a Llama in bfloat16. The defaults have 1.36 G parameters, 2.72 GB."""

    hidden: int = 2048
    layers: int = 26
    intermediate: int = 5632
    vocab: int = 32000
    heads: int = 16
    kv_heads: int = 8

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, shape) in order of use."""
        hidden, kv = self.hidden, self.hidden // self.heads * self.kv_heads
        yield "model.embed_tokens.weight", (self.vocab, hidden)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            yield prefix + "input_layernorm.weight", (hidden,)
            yield prefix + "self_attn.q_proj.weight", (hidden, hidden)
            yield prefix + "self_attn.k_proj.weight", (kv, hidden)
            yield prefix + "self_attn.v_proj.weight", (kv, hidden)
            yield prefix + "self_attn.o_proj.weight", (hidden, hidden)
            yield prefix + "post_attention_layernorm.weight", (hidden,)
            yield prefix + "mlp.gate_proj.weight", (self.intermediate, hidden)
            yield prefix + "mlp.up_proj.weight", (self.intermediate, hidden)
            yield prefix + "mlp.down_proj.weight", (hidden, self.intermediate)
        yield "model.norm.weight", (hidden,)
        yield "lm_head.weight", (self.vocab, hidden)

    def config(self) -> dict[str, object]:
        """As config.json holds it. No end-of-text token: a benchmark decides itself when to stop."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "bfloat16",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocab,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.hidden // self.heads,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "max_position_embeddings": 2048,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": None,
            "pad_token_id": 0,
        }


def weight_nbytes(checkpoint: Path) -> int:
    return sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))


def write_checkpoint(folder: Path, shape: LlamaShape, seed: int, shard_nbytes: int = SHARD_NBYTES) -> None:
    """Write the checkpoint, one shard in memory at a time. `folder` appears only when it is complete."""
    import torch
    from safetensors.torch import save_file

    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    used = 0
    for name, size in shape.tensors():
        nbytes = 2 * _numel(size)
        if used and used + nbytes > shard_nbytes:
            shards.append([])
            used = 0
        shards[-1].append((name, size))
        used += nbytes
    noise = torch.Generator().manual_seed(seed)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file_name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {}
        for name, size in shard:
            values = torch.ones(size) if len(size) == 1 else torch.randn(size, generator=noise) * 0.02
            tensors[name] = values.to(torch.bfloat16)
            weight_map[name] = file_name
        save_file(tensors, partial / file_name, {"format": "pt"})
    total = sum(2 * _numel(size) for _, size in shape.tensors())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (partial / "model.safetensors.index.json").write_text(json.dumps(index))
    (partial / "config.json").write_text(json.dumps(shape.config(), indent=2))
    (partial / "origin.json").write_text(json.dumps({"seed": seed} | asdict(shape)))
    partial.rename(folder)


def write_gguf(checkpoint: Path, path: Path) -> None:
    """Write a Llama checkpoint's weights as a BF16 GGUF without a vocabulary, one tensor in memory at a time.

    Rows of queries and keys go into llama.cpp's rotary order, so the model is the same function.
    """
    import gguf
    import numpy as np
    import numpy.typing as npt
    import torch
    from safetensors import safe_open

    config = json.loads((checkpoint / "config.json").read_text())
    weight_map: dict[str, str] = json.loads((checkpoint / "model.safetensors.index.json").read_text())["weight_map"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    partial = path.with_name(path.name + ".partial")
    writer = gguf.GGUFWriter(partial, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("no_vocab")

    def numbers(name: str) -> npt.NDArray[Any]:
        with safe_open(checkpoint / weight_map[name], "pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        if tensor.dim() == 1:
            return np.asarray(tensor.float().numpy())
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if part in name:
                halves = tensor.view(config[heads], 2, config["head_dim"] // 2, -1)
                tensor = halves.transpose(1, 2).reshape(tensor.shape)
        return np.asarray(tensor.view(torch.uint8).numpy())

    for name in weight_map:
        array = numbers(name)
        raw = gguf.GGMLQuantizationType.BF16 if array.dtype == np.uint8 else None
        writer.add_tensor_info(
            str(names.get_name(name, try_suffixes=(".weight",))), array.shape, array.dtype, array.nbytes, raw
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name in weight_map:
        writer.write_tensor_data(numbers(name))
    writer.close()
    os.replace(partial, path)


def _numel(shape: tuple[int, ...]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="gets llama/ and, with --gguf, model-bf16.gguf")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=LlamaShape().layers)
    parser.add_argument("--gguf", action="store_true")
    options = parser.parse_args()
    checkpoint = options.folder / "llama"
    if not checkpoint.is_dir():
        write_checkpoint(checkpoint, LlamaShape(layers=options.layers), options.seed)
    if options.gguf and not (options.folder / GGUF_NAME).is_file():
        write_gguf(checkpoint, options.folder / GGUF_NAME)


if __name__ == "__main__":
    main()
