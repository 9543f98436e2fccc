"""What cannot be opened is refused in one line that says what, where and what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero.io.errors import CheckpointError, ConfigError, UnsupportedError
from hetero.sources import open_source
from tests.tiny_models import rewrite, write_checkpoint


def refused(kind: type[Exception], path: Path | str, *parts: str, **options: Any) -> None:
    with pytest.raises(kind) as caught:
        open_source(path, **options)
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


def edit_config(folder: Path, **entries: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def test_a_folder_without_config(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    (tmp_path / "config.json").unlink()
    refused(ConfigError, tmp_path, "config.json", str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[]", '{"hidden_size": 3}', '{"model_type": "no_such_model"}', '"x"'])
def test_a_config_that_is_none(text: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    (tmp_path / "config.json").write_text(text)
    refused(ConfigError, tmp_path, "config.json")


def test_a_model_that_generates_nothing(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    refused(ConfigError, tmp_path, "ViT")


def test_a_missing_shard(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", max_shard_size="150KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    refused(CheckpointError, tmp_path, shard.name)


def test_a_missing_tensor(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    rewrite(tmp_path, lambda tensors: tensors.__delitem__("model.layers.1.mlp.up_proj.weight"))
    refused(CheckpointError, tmp_path, "model.layers.1.mlp.up_proj.weight")


@pytest.mark.parametrize("expert", [0, 3], ids=["first", "last"])
def test_a_missing_expert(expert: int, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3_moe")
    rewrite(tmp_path, lambda t: t.__delitem__(f"model.layers.1.mlp.experts.{expert}.up_proj.weight"))
    refused(CheckpointError, tmp_path, "model.layers.1.mlp.experts.gate_up_proj")


def test_a_config_of_another_size(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    edit_config(tmp_path, intermediate_size=96)
    refused(CheckpointError, tmp_path, "gate_proj", "(128, 64)", "(96, 64)")


def test_quantized_weights(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    edit_config(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    refused(UnsupportedError, tmp_path, "gptq")


@pytest.mark.parametrize("dtype", ["int8", "no_such_dtype", torch.int32])
def test_a_dtype_that_is_none(dtype: Any, tmp_path: Path) -> None:
    refused(ConfigError, write_checkpoint(tmp_path, "llama"), repr(dtype), dtype=dtype)


CUSTOM_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_of_its_own_needs_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path / "own", "llama")
    (folder / "own.py").write_text(CUSTOM_CODE)
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    edit_config(folder, model_type="own", auto_map=auto_map)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    refused(ConfigError, folder, "trust_remote_code=True")
    source = open_source(folder, trust_remote_code=True)
    assert type(source.build_model()).__name__ == "OwnModel"
    assert len(source.params) == 30


def test_no_tokenizer(tmp_path: Path) -> None:
    source = open_source(write_checkpoint(tmp_path, "llama"))
    with pytest.raises(ConfigError) as caught:
        source.load_tokenizer()
    assert "\n" not in str(caught.value)


# Hub ids, offline


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def cache(hub: Path, repo_id: str) -> Path:
    """The snapshot folder of a repository in the cache."""
    repo = hub / f"models--{repo_id.replace('/', '--')}"
    commit = "0123456789012345678901234567890123456789"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    (repo / "snapshots" / commit).mkdir(parents=True)
    return repo / "snapshots" / commit


@pytest.mark.parametrize("max_shard_size", [None, "150KB"], ids=["single", "sharded"])
def test_a_cached_id(max_shard_size: str | None, hub: Path) -> None:
    folder = cache(hub, "owner/name")
    write_checkpoint(folder, "llama", max_shard_size=max_shard_size)
    source = open_source("owner/name")
    assert source.path == folder
    assert len(source.params) == 30


def test_a_cached_gguf_of_an_id(hub: Path) -> None:
    from tests.tiny_gguf import write_gguf

    write_gguf(cache(hub, "owner/name") / "tiny.Q8_0.gguf", "llama", quantization="Q8_0")
    assert open_source("owner/name/tiny.Q8_0.gguf").index.kind == "gguf"


@pytest.mark.parametrize("name", ["owner/name", "name", "owner/name/file.gguf", "/no/such/path", "a b", "a/b/c/d", ""])
def test_neither_a_path_nor_an_id(name: str, hub: Path) -> None:
    refused(ConfigError, name, repr(name))


def test_a_mistyped_path_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for text in ("./nosuch", "../no/such", ".hidden", "folder/", str(tmp_path / "nosuch")):
        refused(ConfigError, text, repr(text), "does not exist")


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# not a model")
    refused(ConfigError, tmp_path / "README.md", "README.md", "is no model", ".gguf or .safetensors")


def test_a_hub_id_that_must_not_be_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused(ConfigError, "owner/no-such-model", "'owner/no-such-model'", "HF_HUB_OFFLINE is set")
