"""A folder of safetensors with a config.json: any causal language model transformers can build."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hetero.io.checkpoint import CheckpointIndex, TensorInfo, read_index
from hetero.io.errors import CheckpointError, ConfigError
from hetero.sources.conversion import Extents, check_shape, resolve
from hetero.sources.skeleton import build_on_meta, finish, first_line, refuse_quantized, resolve_dtype
from hetero.sources.source import ParamSource, Source, eos_ids, fingerprint_of

logger = logging.getLogger("hetero.sources")

_FLOAT_FORMATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_COMPARE_NBYTES = 4 << 20


def open_huggingface(path: Path, *, dtype: str | torch.dtype, trust_remote_code: bool) -> Source:
    """Open a folder, one of its .safetensors files, or its index file.

    Reads headers only, with one exception: where a tied parameter is in the file under two names, both are read and
    compared, because only equal ones are tied (the rule of from_pretrained).
    """
    folder = path if path.is_dir() else path.parent
    config = _load_config(folder, trust_remote_code=trust_remote_code)
    refuse_quantized(config, folder)
    index = read_index(path)
    chosen = resolve_dtype(dtype, lambda: _automatic_dtype(config, index))
    model = build_on_meta(config, chosen, trust_remote_code=trust_remote_code)
    resolved = resolve(model, index.tensors, path)
    if resolved.unused:
        logger.debug("%s: %d tensors are not of this model: %s", path, len(resolved.unused), resolved.unused[:8])
    untied = _names_to_untie(model, resolved.extents)

    def complete(model: Any) -> nn.Module:
        _untie(model, untied)
        model._weight_conversions = resolved.used_transforms  # save_pretrained writes the layout that was read
        finish(model, path=folder, trust_remote_code=trust_remote_code)
        return model  # type: ignore[no-any-return]

    complete(model)
    return Source(
        path=path,
        config=config,
        index=index,
        dtype=chosen,
        params=_list_params(model, resolved.extents, path),
        eos_token_ids=eos_ids(getattr(model, "generation_config", None)),
        fingerprint=fingerprint_of(index, config),
        _build=lambda: complete(build_on_meta(config, chosen, trust_remote_code=trust_remote_code)),
        _load_tokenizer=lambda: _load_tokenizer(folder, trust_remote_code=trust_remote_code),
        _built=model,
    )


def _load_config(folder: Path, *, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder}: has no config.json; give the folder transformers' save_pretrained wrote")
    try:
        return AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=trust_remote_code)
    except (ValueError, OSError, KeyError, TypeError) as error:
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise ConfigError(
                f"{folder}: this model runs code of its own; read it, then pass trust_remote_code=True"
            ) from error
        raise ConfigError(f"{folder / 'config.json'}: {first_line(error)}") from error


def _load_tokenizer(folder: Path, *, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=trust_remote_code)
    except (ValueError, OSError, KeyError, TypeError, ImportError) as error:
        raise ConfigError(f"{folder}: has no tokenizer transformers can load: {first_line(error)}") from error


def _automatic_dtype(config: Any, index: CheckpointIndex) -> torch.dtype:
    """The config's dtype, else that of the first floating tensor, as from_pretrained(dtype="auto")."""
    if config.dtype is not None:
        return resolve_dtype(config.dtype, torch.get_default_dtype)
    tensors = sorted(index.tensors.values(), key=lambda tensor: (tensor.path, tensor.name))
    formats = (tensor.format for tensor in tensors)
    return next((_FLOAT_FORMATS[f] for f in formats if f in _FLOAT_FORMATS), torch.get_default_dtype())


def _shared_names(model: Any) -> dict[str, tuple[str, ...]]:
    """Every parameter name -> all names of that parameter, in registration order."""
    by_id: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(param), []).append(name)
    return {name: tuple(names) for names in by_id.values() for name in names}


def _names_to_untie(model: Any, extents: dict[str, Extents]) -> list[str]:
    """Names that the config ties to another, but for which the file has a value of its own."""
    untied = []
    for name, names in _shared_names(model).items():
        first = next((other for other in names if other in extents), name)
        if name != first and name in extents and not _same_bytes(extents[first], extents[name]):
            logger.warning("%s and %s are tied by the config but differ in the file: not tied", first, name)
            untied.append(name)
    return untied


def _same_bytes(left: Extents, right: Extents) -> bool:
    if (left.shape, left.format) != (right.shape, right.format):
        return False
    if len(left.pieces) != 1 or len(right.pieces) != 1:
        return False
    blocks = zip(_blocks(left.pieces[0].tensor), _blocks(right.pieces[0].tensor), strict=True)
    return all(a == b for a, b in blocks)


def _blocks(tensor: TensorInfo) -> Iterator[bytes]:
    with open(tensor.path, "rb") as file:
        for start in range(0, tensor.nbytes, _COMPARE_NBYTES):
            nbytes = min(_COMPARE_NBYTES, tensor.nbytes - start)
            yield os.pread(file.fileno(), nbytes, tensor.offset + start)


def _untie(model: Any, names: list[str]) -> None:
    for name in names:
        module_name, _, leaf = name.rpartition(".")
        module = model.get_submodule(module_name)
        tied = module._parameters[leaf]
        module._parameters[leaf] = nn.Parameter(torch.empty_like(tied), requires_grad=tied.requires_grad)
        model.all_tied_weights_keys.pop(name, None)


def _list_params(model: Any, extents: dict[str, Extents], path: Path) -> list[ParamSource]:
    """All that the model takes from the file, once, in registration order. Raises CheckpointError for a gap."""
    shared = _shared_names(model)
    params: list[ParamSource] = []
    missing: list[str] = []
    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""
        for leaf, param in module._parameters.items():
            names = shared.get(prefix + leaf, ())
            if param is None or not names or names[0] != prefix + leaf:
                continue  # listed under its first name
            stored = next((name for name in names if name in extents), None)
            if stored is None:
                missing.append(names[0])
                continue
            check_shape(stored, extents[stored], tuple(param.shape), path)
            params.append(_param(names, "parameter", extents[stored]))
        for leaf, buffer in module._buffers.items():
            name = prefix + leaf
            # A persistent buffer the file lacks keeps its initial value, as in from_pretrained.
            if buffer is not None and leaf not in module._non_persistent_buffers_set and name in extents:
                check_shape(name, extents[name], tuple(buffer.shape), path)
                params.append(_param((name,), "buffer", extents[name]))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(
            path, f"lacks {missing[0]!r}{more}, which the config asks for; the download is incomplete"
        )
    return params


def _param(names: tuple[str, ...], kind: Any, extents: Extents) -> ParamSource:
    return ParamSource(names, kind, extents.shape, extents.format, extents.pieces)
