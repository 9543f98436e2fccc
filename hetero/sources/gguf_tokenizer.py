"""A tokenizer from a GGUF header, built by transformers' own converter on our parsed metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hetero.io.errors import ConfigError
from hetero.sources.skeleton import first_line

_SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def load_tokenizer(metadata: dict[str, Any], config: Any, path: Path) -> Any:
    """Return a fast tokenizer equal to AutoTokenizer.from_pretrained(folder, gguf_file=...).

    Raises ConfigError if the file has no vocabulary, or one of a kind transformers cannot convert.
    """
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    if "tokenizer.ggml.tokens" not in metadata:
        raise ConfigError(f"{path}: holds no tokenizer; pass token ids, or use a file converted with one")
    vocabulary, options = (
        {name: metadata[f"tokenizer.{key}"] for key, name in GGUF_TOKENIZER_MAPPING[group].items()
         if f"tokenizer.{key}" in metadata}
        for group in ("tokenizer", "tokenizer_config")
    )  # fmt: skip
    if vocabulary.get("tokenizer_type") == "llama":
        options.setdefault("add_bos_token", True)  # what llama.cpp does where an older file does not say
    for name, key in _SPECIAL_TOKENS.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}")
        options[name] = None if token_id is None else vocabulary["tokens"][token_id]
    try:
        backend, _ = convert_gguf_tokenizer(metadata["general.architecture"], vocabulary)
    except (ValueError, KeyError, IndexError) as error:
        raise ConfigError(f"{path}: its tokenizer cannot be built: {first_line(error)}") from error
    # The model's own class, for its defaults (a mask token, the padding side); its own vocabulary is replaced.
    tokenizer_class: Any = TOKENIZER_MAPPING.get(type(config), TokenizersBackend)
    return tokenizer_class(tokenizer_object=backend, name_or_path=str(path), **options)
