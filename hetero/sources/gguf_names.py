"""What llama.cpp's converter did to each architecture's tensors, so that it can be undone on reading.

One table per architecture: the parameter's name in transformers, with `{i}` for the layer, -> the tensor's name in the
file and what happened to it. An architecture that is not here is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hetero.sources.source import Transform


@dataclass(frozen=True, slots=True)
class Rule:
    """How one parameter is stored."""

    tensors: tuple[str, ...]
    """Names in the file. Two for stacked experts whose gate and up lie apart: their rows follow each other."""
    transform: Transform = "none"
    rotary: Literal["query", "key"] | None = None
    """The rows of these heads are in llama.cpp's rotary order."""


def _plain(names: dict[str, str], *suffixes: str) -> dict[str, Rule]:
    return {f"{ours}.{suffix}": Rule((f"{theirs}.{suffix}",)) for ours, theirs in names.items() for suffix in suffixes}


def _minus_one(names: dict[str, str]) -> dict[str, Rule]:
    return {f"{ours}.weight": Rule((f"{theirs}.weight",), "minus_one") for ours, theirs in names.items()}


_LAYER = "model.layers.{i}."
_EMBEDDINGS = _plain({"model.embed_tokens": "token_embd", "lm_head": "output"}, "weight")
_NORMS = {
    "model.norm": "output_norm",
    _LAYER + "input_layernorm": "blk.{i}.attn_norm",
    _LAYER + "post_attention_layernorm": "blk.{i}.ffn_norm",
}
_GEMMA_NORMS = {
    "model.norm": "output_norm",
    _LAYER + "input_layernorm": "blk.{i}.attn_norm",
    _LAYER + "post_attention_layernorm": "blk.{i}.post_attention_norm",
    _LAYER + "pre_feedforward_layernorm": "blk.{i}.ffn_norm",
    _LAYER + "post_feedforward_layernorm": "blk.{i}.post_ffw_norm",
}
_HEAD_NORMS = {
    _LAYER + "self_attn.q_norm": "blk.{i}.attn_q_norm",
    _LAYER + "self_attn.k_norm": "blk.{i}.attn_k_norm",
}
_QKV = {
    _LAYER + "self_attn.q_proj": "blk.{i}.attn_q",
    _LAYER + "self_attn.k_proj": "blk.{i}.attn_k",
    _LAYER + "self_attn.v_proj": "blk.{i}.attn_v",
}
_OUT = {_LAYER + "self_attn.o_proj": "blk.{i}.attn_output"}
_MLP = {
    _LAYER + "mlp.gate_proj": "blk.{i}.ffn_gate",
    _LAYER + "mlp.up_proj": "blk.{i}.ffn_up",
    _LAYER + "mlp.down_proj": "blk.{i}.ffn_down",
}
_ATTENTION = _plain(_QKV | _OUT, "weight")
_DENSE = _EMBEDDINGS | _ATTENTION | _plain(_MLP, "weight")
_ROTARY_ROWS = {
    _LAYER + "self_attn.q_proj.weight": Rule(("blk.{i}.attn_q.weight",), rotary="query"),
    _LAYER + "self_attn.k_proj.weight": Rule(("blk.{i}.attn_k.weight",), rotary="key"),
}
_EXPERTS = {
    _LAYER + "mlp.gate.weight": Rule(("blk.{i}.ffn_gate_inp.weight",)),
    _LAYER + "mlp.experts.gate_up_proj": Rule(("blk.{i}.ffn_gate_exps.weight", "blk.{i}.ffn_up_exps.weight")),
    _LAYER + "mlp.experts.down_proj": Rule(("blk.{i}.ffn_down_exps.weight",)),
}
_PHI3 = _plain(
    {
        _LAYER + "self_attn.qkv_proj": "blk.{i}.attn_qkv",
        _LAYER + "self_attn.o_proj": "blk.{i}.attn_output",
        _LAYER + "mlp.gate_up_proj": "blk.{i}.ffn_up",
        _LAYER + "mlp.down_proj": "blk.{i}.ffn_down",
    },
    "weight",
)

_GPT2_LAYER = "transformer.h.{i}."
_GPT2_NORMS = {
    "transformer.ln_f": "output_norm",
    _GPT2_LAYER + "ln_1": "blk.{i}.attn_norm",
    _GPT2_LAYER + "ln_2": "blk.{i}.ffn_norm",
}
_GPT2_LINEAR = {  # Conv1D keeps (in, out), the file (out, in)
    _GPT2_LAYER + "attn.c_attn": "blk.{i}.attn_qkv",
    _GPT2_LAYER + "attn.c_proj": "blk.{i}.attn_output",
    _GPT2_LAYER + "mlp.c_fc": "blk.{i}.ffn_up",
    _GPT2_LAYER + "mlp.c_proj": "blk.{i}.ffn_down",
}
_GPT2 = (
    _plain({"transformer.wte": "token_embd", "transformer.wpe": "position_embd", "lm_head": "output"}, "weight")
    | _plain(_GPT2_NORMS, "weight", "bias")
    | _plain(_GPT2_LINEAR, "bias")
    | {f"{ours}.weight": Rule((f"{theirs}.weight",), "transpose") for ours, theirs in _GPT2_LINEAR.items()}
)

ARCHITECTURES: dict[str, dict[str, Rule]] = {
    "llama": _DENSE | _plain(_NORMS, "weight") | _ROTARY_ROWS,
    "qwen2": _DENSE | _plain(_NORMS, "weight") | _plain(_QKV, "bias"),
    "qwen3": _DENSE | _plain(_NORMS | _HEAD_NORMS, "weight"),
    "qwen3moe": _EMBEDDINGS | _ATTENTION | _plain(_NORMS | _HEAD_NORMS, "weight") | _EXPERTS,
    "gemma2": _DENSE | _minus_one(_GEMMA_NORMS),
    "gemma3": _DENSE | _minus_one(_GEMMA_NORMS | _HEAD_NORMS),
    "phi3": _EMBEDDINGS | _PHI3 | _plain(_NORMS, "weight"),
    "gpt2": _GPT2,
}

# Tensors that are part of the configuration, not weights: read (or refused) by gguf_config.
CONFIG_TENSORS = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
