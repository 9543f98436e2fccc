"""A .gguf file: config, tokenizer and extents from its header; packed weights stay packed."""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hetero.io.checkpoint import FORMAT_BLOCKS, CheckpointIndex, TensorInfo, read_index
from hetero.io.errors import CheckpointError, UnsupportedError
from hetero.sources.conversion import Extents, concatenate, stack
from hetero.sources.gguf_config import architecture_of, make_config
from hetero.sources.gguf_names import ARCHITECTURES, CONFIG_TENSORS, Rule
from hetero.sources.gguf_tokenizer import load_tokenizer
from hetero.sources.skeleton import build_on_meta, finish, resolve_dtype
from hetero.sources.source import ParamSource, Source, eos_ids, fingerprint_of

logger = logging.getLogger("hetero.sources")

_LAYER = re.compile(r"\.(\d+)\.")


def open_gguf(path: Path, *, dtype: str | torch.dtype) -> Source:
    """Open a .gguf file, or a folder that holds exactly one. Reads its header only."""
    index = read_index(path)
    architecture = architecture_of(index)
    config = make_config(index, architecture)
    chosen = resolve_dtype(dtype, torch.get_default_dtype)  # what transformers dequantises these architectures to

    def build() -> nn.Module:
        model = build_on_meta(config, chosen, trust_remote_code=False)
        finish(model, path=None, trust_remote_code=False)
        return model  # type: ignore[no-any-return]

    model: Any = build()
    ends = (index.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eot", "eom"))
    return Source(
        path=path,
        config=config,
        index=index,
        dtype=chosen,
        params=_list_params(model, index, ARCHITECTURES[architecture]),
        # A chat file may end turns with another token than texts; llama.cpp stops at each of them, and so do we.
        eos_token_ids=eos_ids(getattr(model, "generation_config", None), ends),
        fingerprint=fingerprint_of(index, config),
        _build=build,
        _load_tokenizer=lambda: load_tokenizer(index.metadata, config, path),
        _built=model,
    )


def _list_params(model: Any, index: CheckpointIndex, rules: dict[str, Rule]) -> list[ParamSource]:
    by_id: dict[int, list[str]] = {}
    params: dict[str, nn.Parameter] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(param), []).append(name)
        params.setdefault(by_id[id(param)][0], param)
    used: set[str] = set(CONFIG_TENSORS)
    sources = []
    for names in by_id.values():
        rule, layer = _rule_for(names, rules, index)
        tensors = [index.tensors[name.format(i=layer)] for name in rule.tensors]
        used.update(tensor.name for tensor in tensors)
        sources.append(_param(tuple(names), rule, tensors, tuple(params[names[0]].shape), model.config))
    unused = sorted(set(index.tensors) - used)
    if unused:
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        raise UnsupportedError(
            f"{index.path}: {unused[0]!r}{more} has no place in a {model.config.model_type} model, so the file is of a "
            "variant that is not supported; use the model's safetensors"
        )
    return sources


def _rule_for(names: list[str], rules: dict[str, Rule], index: CheckpointIndex) -> tuple[Rule, str]:
    """The rule of the first of these tied names that the file has tensors for, and its layer number."""
    for name in names:
        match = _LAYER.search(name)
        layer = match[1] if match else ""
        rule = rules.get(_LAYER.sub(".{i}.", name, count=1))
        if rule is None:
            raise UnsupportedError(f"{index.path}: no GGUF name is known for {name!r}; use the model's safetensors")
        if all(tensor.format(i=layer) in index.tensors for tensor in rule.tensors):
            return rule, layer
    raise CheckpointError(index.path, f"lacks a tensor for {names[0]!r}, which its header asks for")


def _param(
    names: tuple[str, ...], rule: Rule, tensors: list[TensorInfo], shape: tuple[int, ...], config: Any
) -> ParamSource:
    path = tensors[0].path
    try:
        found = _side_by_side(tensors)
    except ValueError as error:
        raise CheckpointError(path, f"{names[0]!r} cannot be put together: {error}") from error
    stored_shape = shape[::-1] if rule.transform == "transpose" else shape
    if found.shape != stored_shape:
        raise CheckpointError(
            path, f"{tensors[0].name!r} has shape {found.shape}, its header makes it {stored_shape} for {names[0]!r}"
        )
    permutation = None
    if rule.rotary is not None:
        num_heads = config.num_attention_heads if rule.rotary == "query" else config.num_key_value_heads
        permutation = (num_heads, shape[0] // num_heads)
    return ParamSource(names, "parameter", shape, found.format, found.pieces, permutation, rule.transform)


def _side_by_side(tensors: list[TensorInfo]) -> Extents:
    """One tensor as it is; stacked experts of several tensors expert by expert, the tensors' rows in turn."""
    if len(tensors) == 1:
        return Extents.of(tensors[0])
    split = [[Extents.of(expert) for expert in _experts(tensor)] for tensor in tensors]
    return stack([concatenate(parts, dim=0) for parts in zip(*split, strict=True)])


def _experts(tensor: TensorInfo) -> list[TensorInfo]:
    """The extents of the slices of a stacked tensor along its first dimension."""
    num_experts, *rest = tensor.shape
    block_numel, block_nbytes = FORMAT_BLOCKS[tensor.format]
    nbytes = math.prod(rest) // block_numel * block_nbytes
    return [
        dataclasses.replace(tensor, offset=tensor.offset + i * nbytes, nbytes=nbytes, shape=tuple(rest))
        for i in range(num_experts)
    ]
