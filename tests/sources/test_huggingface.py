"""Safetensors sources: what a source says about each parameter against what from_pretrained loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hetero.sources import Source, open_source
from tests.tiny_models import FAMILIES, param_values, rewrite, tiny_model, write_checkpoint

TIED_BY_DEFAULT = {"gemma2", "gemma3", "gpt2", "opt"}


def reference(path: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, **options)


def assert_same_model(source: Source, expected: Any) -> Any:
    """Every parameter once, its bytes, the ties, the buffers and the configs. Returns the built model."""
    model: Any = source.build_model()
    wanted = dict(expected.named_parameters(remove_duplicate=False))
    built = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers())
    listed = [name for param in source.params if param.kind == "parameter" for name in param.names]
    assert sorted(listed) == sorted(wanted)
    for param in source.params:
        values = param_values(param)
        for name in param.names:
            theirs = wanted[name] if param.kind == "parameter" else expected.get_buffer(name)
            assert values.shape == param.shape == theirs.shape
            skeleton = built[name] if param.kind == "parameter" else buffers[name]
            assert skeleton.dtype == theirs.dtype, name
            assert torch.equal(values.to(theirs.dtype), theirs), name
        if param.kind == "buffer":
            buffers[param.name].copy_(values)
    assert all(param.is_meta for param in built.values())
    assert tied_groups(built) == tied_groups(wanted)
    assert [param.names for param in source.params if len(param.names) > 1] == list(tied_groups(wanted))
    expected_buffers = dict(expected.named_buffers())
    assert list(buffers) == list(expected_buffers)
    for name, buffer in buffers.items():
        assert buffer.dtype == expected_buffers[name].dtype, name
        assert torch.equal(buffer, expected_buffers[name]), name
    assert not model.training
    assert model.config.to_dict() == expected.config.to_dict()
    assert model.generation_config.to_dict() == expected.generation_config.to_dict()
    return model


def tied_groups(params: dict[str, torch.Tensor]) -> tuple[tuple[str, ...], ...]:
    groups: dict[int, list[str]] = {}
    for name, param in params.items():
        groups.setdefault(id(param), []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_is_what_from_pretrained_loads(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family, dtype=dtype)
    source = open_source(tmp_path)
    assert source.dtype == dtype
    model = assert_same_model(source, reference(tmp_path))
    assert (model.lm_head if hasattr(model, "lm_head") else model.embed_out) is not None
    assert any(len(param.names) > 1 for param in source.params) == (family in TIED_BY_DEFAULT)


@pytest.mark.parametrize("max_shard_size", [None, "150KB"], ids=["single", "sharded"])
@pytest.mark.parametrize("misaligned", [False, True], ids=["aligned", "at-8-mod-16"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_layouts_on_disk(tied: bool, misaligned: bool, max_shard_size: str | None, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3", tied=tied, misaligned=misaligned, max_shard_size=max_shard_size)
    source = open_source(tmp_path)
    assert len({piece.tensor.path for param in source.params for piece in param.pieces}) > 1 or max_shard_size is None
    residues = {piece.tensor.offset % 16 for param in source.params for piece in param.pieces}
    assert residues == {8 if misaligned else 0}
    assert_same_model(source, reference(tmp_path))


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "opt"])
def test_a_checkpoint_of_the_body_alone(family: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family, base_only=True, tied=True)
    assert not any("lm_head" in name for name in open_source(tmp_path).index.tensors)
    assert_same_model(open_source(tmp_path), reference(tmp_path))


def test_order_is_order_of_use(tmp_path: Path) -> None:
    source = open_source(write_checkpoint(tmp_path, "llama"))
    names = [param.name for param in source.params]
    assert names[0] == "model.embed_tokens.weight"
    assert names[-2:] == ["model.norm.weight", "lm_head.weight"]
    layers = [int(name.split(".")[2]) for name in names if ".layers." in name]
    assert layers == sorted(layers)


def test_experts_are_extents_of_one_stacked_parameter(tmp_path: Path) -> None:
    source = open_source(write_checkpoint(tmp_path, "mixtral"))
    stacked = next(param for param in source.params if param.name.endswith("layers.1.mlp.experts.gate_up_proj"))
    assert len(stacked.pieces) == 8  # gate and up of four experts
    ends = [piece.dst_offset + piece.tensor.nbytes for piece in stacked.pieces]
    assert [piece.dst_offset for piece in stacked.pieces] == [0, *ends[:-1]]
    assert ends[-1] == stacked.nbytes == 4 * 256 * 64 * 4
    assert [piece.tensor.name.split(".")[-2] for piece in stacked.pieces[:4]] == ["w1", "w3", "w1", "w3"]


def test_an_asked_dtype_is_the_models(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "dots1")
    source = open_source(tmp_path, dtype="bfloat16")
    assert source.dtype == torch.bfloat16
    assert_same_model(source, reference(tmp_path, dtype=torch.bfloat16))


def test_models_do_not_share_a_config(tmp_path: Path) -> None:
    source = open_source(write_checkpoint(tmp_path, "llama"))
    first, second = source.build_model(), source.build_model()
    assert first.config is not second.config is not source.config
    first.config.use_cache = False  # type: ignore[union-attr]
    assert second.config.use_cache and source.config.use_cache  # type: ignore[union-attr]
    assert first.get_parameter("model.norm.weight") is not second.get_parameter("model.norm.weight")


def test_later_models_are_as_the_first(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "gemma2")
    source = open_source(tmp_path)
    source.build_model()
    assert_same_model(source, reference(tmp_path))


def test_keys_of_no_parameter_are_ignored(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.full((8,), 7.0)
        tensors["vision_tower.weight"] = torch.ones(4)

    rewrite(tmp_path, add)
    assert_same_model(open_source(tmp_path), reference(tmp_path))


@pytest.mark.parametrize("equal", [True, False], ids=["equal", "different"])
def test_a_tied_head_that_is_in_the_file(equal: bool, tmp_path: Path) -> None:
    """Tied only if it has the same bytes, whatever the config says."""
    write_checkpoint(tmp_path, "llama", tied=True)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][-1, -1] += 0 if equal else 1

    rewrite(tmp_path, add)
    source = open_source(tmp_path)
    assert any(len(param.names) > 1 for param in source.params) == equal
    source.build_model()
    assert_same_model(source, reference(tmp_path))


def test_a_tied_pair_stored_under_its_second_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", tied=True)
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    assert_same_model(open_source(tmp_path), reference(tmp_path))


@pytest.mark.parametrize("original", [True, False], ids=["one-tensor-per-expert", "stacked"])
def test_saving_writes_the_layout_that_was_read(original: bool, tmp_path: Path) -> None:
    tiny_model("mixtral").save_pretrained(tmp_path, save_original_format=original)
    source = open_source(tmp_path)
    assert ("model.layers.0.mlp.experts.down_proj" in source.index.tensors) != original
    model = assert_same_model(source, reference(tmp_path))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in source.params:
            model.get_parameter(param.name).copy_(param_values(param))
    model.save_pretrained(tmp_path / "again")
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path, tmp_path / "again"))
    assert sorted(before) == sorted(after)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_a_class_keeps_in_float32_stays_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaForCausalLM

    write_checkpoint(tmp_path, "llama", dtype=torch.bfloat16, tied=True)
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", {"o_proj", "embed_tokens"})
    model = assert_same_model(open_source(tmp_path), reference(tmp_path))
    assert model.model.layers[0].self_attn.o_proj.weight.dtype == torch.float32
    assert model.model.layers[0].self_attn.q_proj.weight.dtype == torch.bfloat16


def test_generation_config_and_ends(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    text = {"eos_token_id": [2, 5], "temperature": 0.6, "do_sample": True, "transformers_version": "5.24.0"}
    (tmp_path / "generation_config.json").write_text(json.dumps(text))
    source = open_source(tmp_path)
    assert source.eos_token_ids == (2, 5)
    model: Any = source.build_model()
    assert model.generation_config.temperature == 0.6


def test_the_fingerprint_follows_files_and_config(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    first = open_source(tmp_path).fingerprint
    assert open_source(tmp_path).fingerprint == first
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    second = open_source(tmp_path).fingerprint
    rewrite(tmp_path, lambda tensors: None)
    assert len({first, second, open_source(tmp_path).fingerprint}) == 3


@pytest.mark.usefixtures("no_leaks")
def test_a_file_or_an_index_instead_of_the_folder(tmp_path: Path) -> None:
    single = write_checkpoint(tmp_path / "a", "llama")
    sharded = write_checkpoint(tmp_path / "b", "llama", max_shard_size="150KB")
    for path in (single / "model.safetensors", sharded / "model.safetensors.index.json"):
        assert [p.name for p in open_source(path).params] == [p.name for p in open_source(path.parent).params]


def test_importing_the_package_imports_no_transformers() -> None:
    code = "import sys, hetero.sources; assert not {'transformers', 'huggingface_hub', 'gguf'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
