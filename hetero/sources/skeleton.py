"""A transformers model without weights: parameters on meta, buffers real, as from_pretrained would leave the rest.

The calls into transformers follow `PreTrainedModel.from_pretrained`, step by step; what it would do on the weights is
left out. Buffers that a checkpoint does not hold (rotary frequencies, masks) are made by the model's own initialiser,
which skips everything marked as initialised.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hetero.io.errors import ConfigError, UnsupportedError


def first_line(error: BaseException) -> str:
    """The first line of a library's message, for our one-line errors."""
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__


def resolve_dtype(dtype: str | torch.dtype, automatic: Callable[[], torch.dtype]) -> torch.dtype:
    """A floating dtype from its name. Raises ConfigError for anything that is not one."""
    if dtype == "auto":
        return automatic()
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(f"dtype={dtype!r} is not a floating dtype; use 'auto', 'float32', 'bfloat16' or 'float16'")
    return found


def build_on_meta(config: Any, dtype: torch.dtype, *, trust_remote_code: bool) -> Any:
    """Build the causal LM of `config` entirely on meta, ties included. `config` is copied. Raises ConfigError."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    try:
        with torch.device("meta"):
            options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
            model: Any = AutoModelForCausalLM.from_config(config, **options)  # type: ignore[no-untyped-call]
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError(f"no causal language model can be built from this config: {first_line(error)}") from error
    _apply_dtype_plan(model, dtype)
    return model


def _apply_dtype_plan(model: Any, dtype: torch.dtype) -> None:
    """Give what a model insists on keeping in float32 that dtype, as loading it would."""
    from transformers.core_model_loading import build_glob_alternation

    plan = model._get_dtype_plan(dtype)
    if not plan:
        return
    pattern, group_to_glob, _ = build_glob_alternation(list(plan))
    first_names: dict[torch.Tensor, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        first_names.setdefault(tensor, name)
    replaced: dict[torch.Tensor, torch.Tensor] = {}
    for tensor, name in first_names.items():
        match = pattern.search(name)
        if match is None or match.lastgroup is None:
            continue
        other = tensor.to(plan[group_to_glob[match.lastgroup]])
        replaced[tensor] = nn.Parameter(other, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else other
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            # By identity, not by name: what is tied to a kept tensor follows it.
            store.update({name: replaced[tensor] for name, tensor in store.items() if tensor in replaced})


def finish(model: Any, *, path: Path | None, trust_remote_code: bool) -> None:
    """Make a meta model usable once its parameters get data: real buffers, eval mode, generation config.

    `path` is the folder with a generation config, or None where from_pretrained reads none (GGUF).
    """
    for param in model.parameters():
        param._is_hf_initialized = True  # the initialiser below leaves it alone
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros_like(buffer, device="cpu")
    with torch.no_grad():
        model.initialize_weights()
    model.eval()
    if path is not None and model.can_generate() and hasattr(model, "adjust_generation_fn"):
        local = {"cache_dir": None, "force_download": False, "proxies": None, "local_files_only": True, "token": None}
        model.adjust_generation_fn(
            None, True, None, str(path), revision=None, subfolder="", trust_remote_code=trust_remote_code, **local
        )


def refuse_quantized(config: Any, path: Path) -> None:
    """Raise UnsupportedError for a checkpoint whose weights only one of transformers' quantizers can read."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
    raise UnsupportedError(
        f"{path}: weights quantized with {method!s} cannot be streamed; use the unquantized model or a GGUF file"
    )
