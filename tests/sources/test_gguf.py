"""GGUF sources: every architecture of the table against transformers' own (dequantising) loader."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetero.io.errors import CheckpointError, ConfigError, UnsupportedError
from hetero.sources import Source, open_source
from hetero.sources.gguf_names import ARCHITECTURES as TABLE
from tests.tiny_gguf import ARCHITECTURES, SAMPLE, write_gguf
from tests.tiny_models import param_values

# transformers takes these from the config class and not from the file, so its loader needs them as they are there.
WHAT_TRANSFORMERS_ASSUMES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {"moe_intermediate_size": 768, "num_hidden_layers": 2},
    "gpt2": {"n_positions": 1024},
    "gemma2": {"query_pre_attn_scalar": 256},
    "gemma3": {"query_pre_attn_scalar": 256},
}
# A gemma2 file never has a head of its own.
FAMILY_AND_TIE = [(f, tied) for f in sorted(ARCHITECTURES) for tied in (True, False) if tied or f != "gemma2"]
TEXTS = [
    SAMPLE,
    "",
    " leading and  double   spaces\n\n\tand tabs ",
    "numbers 1234567 3.14, don't WE'LL",
    "naïve café — „Grüße“, Ελληνικά, русский, 日本語, العربية",
    "👩‍👩‍👧 emoji and a nul \x00 and \u200b",
    "<|eos|> in the middle<|bos|><eos>",
]


def _tie_id(value: object) -> str | None:
    return {True: "tied", False: "untied"}.get(value) if isinstance(value, bool) else None


def reference(path: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **options)


def assert_same_weights(source: Source, expected: Any) -> None:
    wanted = dict(expected.named_parameters(remove_duplicate=False))
    assert {name for param in source.params for name in param.names} == set(wanted)
    for param in source.params:
        values = param_values(param)
        assert values.shape == param.shape
        for name in param.names:
            assert torch.equal(values, wanted[name]), name


def assert_same_config(ours: Any, path: Path) -> None:
    from transformers import AutoConfig

    left, right = ours.to_dict(), AutoConfig.from_pretrained(path.parent, gguf_file=path.name).to_dict()
    right.pop("_model_name_or_path", None)  # theirs: the file's general.name
    left.pop("_model_name_or_path", None)
    right.pop("feed_forward_length", None), right.pop("n_ctx", None)  # no config attribute of gpt2
    if left["model_type"] == "gpt2":
        assert left.pop("n_inner") == 4 * left["n_embd"]
        right.pop("n_inner")
    assert left == right


@pytest.mark.parametrize("quantization", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
@pytest.mark.parametrize(
    ("family", "tied"), FAMILY_AND_TIE, ids=lambda value: {True: "tied", False: "untied"}.get(value)
)
def test_every_tensor_and_the_config_are_transformers(
    family: str, quantization: str, tied: bool, tmp_path: Path
) -> None:
    overrides = WHAT_TRANSFORMERS_ASSUMES.get(family, {})
    path = write_gguf(tmp_path / "tiny.gguf", family, quantization=quantization, tie_word_embeddings=tied, **overrides)
    source = open_source(path)
    expected = reference(path)
    assert source.dtype == expected.dtype == torch.float32
    assert_same_config(source.config, path)
    assert_same_weights(source, expected)
    model: Any = source.build_model()
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    assert not model.training
    assert model.generation_config.to_dict() == expected.generation_config.to_dict()
    for (name, ours), (_, theirs) in zip(model.named_buffers(), expected.named_buffers(), strict=True):
        assert torch.equal(ours, theirs), name


def test_the_tests_cover_the_table() -> None:
    assert {architecture for architecture, _, _ in ARCHITECTURES.values()} == set(TABLE)


@pytest.mark.parametrize("family", sorted(ARCHITECTURES))
def test_the_tokenizer_is_transformers(family: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    overrides = WHAT_TRANSFORMERS_ASSUMES.get(family, {})
    path = write_gguf(tmp_path / "tiny.gguf", family, **overrides)
    assert_same_tokenizer(
        open_source(path).load_tokenizer(), AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    )


def assert_same_tokenizer(ours: Any, theirs: Any) -> None:
    assert len(ours) == len(theirs)
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id, ours.unk_token_id) == (
        theirs.bos_token_id,
        theirs.eos_token_id,
        theirs.pad_token_id,
        theirs.unk_token_id,
    )
    assert type(ours) is type(theirs)
    assert (ours.padding_side, ours.model_max_length) == (theirs.padding_side, theirs.model_max_length)
    for text in TEXTS:
        for special in (True, False):
            ids = ours(text, add_special_tokens=special)["input_ids"]
            assert ids == theirs(text, add_special_tokens=special)["input_ids"], text
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    chat = [{"role": "user", "content": "héllo"}, {"role": "assistant", "content": "a"}]
    for prompt in (True, False):
        rendered = ours.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
        assert rendered == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)


def test_the_dtype_asked_for_is_the_models(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "llama", quantization="Q8_0")
    source = open_source(path, dtype="bfloat16")
    expected = reference(path, dtype=torch.bfloat16)
    assert source.build_model().get_parameter("model.norm.weight").dtype == expected.dtype == source.dtype
    wanted = dict(expected.named_parameters())
    for param in source.params:
        assert torch.equal(param_values(param).to(source.dtype), wanted[param.name]), param.name


def test_what_the_file_says_wins_over_a_class_default(tmp_path: Path) -> None:
    """transformers would take head_dim 128, 768 wide experts and 1024 positions, and fail on these files."""
    qwen3 = open_source(write_gguf(tmp_path / "a.gguf", "qwen3", head_dim=16)).config
    moe = open_source(write_gguf(tmp_path / "b.gguf", "qwen3_moe", moe_intermediate_size=96)).config
    gpt2 = open_source(write_gguf(tmp_path / "c.gguf", "gpt2", n_positions=64, n_inner=96)).config
    assert (qwen3.head_dim, moe.moe_intermediate_size, gpt2.n_positions, gpt2.n_inner) == (16, 96, 64, 96)


@pytest.mark.usefixtures("no_leaks")
def test_a_folder_with_one_file_is_enough(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "llama")
    assert [p.pieces for p in open_source(tmp_path).params] == [p.pieces for p in open_source(path).params]


def test_end_of_turn_tokens_end_a_text_too(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "llama", metadata={"tokenizer.ggml.eot_token_id": 7})
    assert open_source(path).eos_token_ids == (2, 7)


def llama3_factors(head_dim: int, factor: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    """As llama.cpp's converter computes rope_freqs.weight."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = LlamaConfig(
        head_dim=head_dim, rope_parameters={**scaling, "rope_theta": 1e4, "original_max_position_embeddings": 8192}
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / (1e4 ** (torch.arange(0, head_dim, 2) / head_dim))
    return (plain / scaled).numpy().astype(np.float32)


def test_llama3_frequencies_come_back_exactly(tmp_path: Path) -> None:
    factors = llama3_factors(64, 8.0)
    assert len(set(factors.tolist())) > 3  # low, high and smoothed frequencies are all there
    path = write_gguf(tmp_path / "tiny.gguf", "llama", head_dim=64, tensors={"rope_freqs.weight": factors})
    model: Any = open_source(path).build_model()
    plain = 1.0 / (1e4 ** (torch.arange(0, 64, 2) / 64))
    assert torch.allclose(model.model.rotary_emb.inv_freq, plain / torch.from_numpy(factors), rtol=1e-6)
    assert model.config.rope_parameters["rope_type"] == "llama3"


def test_linear_frequencies(tmp_path: Path) -> None:
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    plain: Any = open_source(write_gguf(tmp_path / "a.gguf", "llama")).build_model()
    scaled: Any = open_source(write_gguf(tmp_path / "b.gguf", "llama", metadata=scaling)).build_model()
    assert torch.equal(scaled.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq / 4)


def one_line(error: BaseException, *parts: str) -> None:
    assert "\n" not in str(error)
    for part in parts:
        assert part in str(error)


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "llama", metadata={"general.architecture": None})
    content = path.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", 1)
    path.write_bytes(content)
    with pytest.raises(UnsupportedError) as caught:
        open_source(path)
    one_line(caught.value, "'mamba'", "llama", str(path))


@pytest.mark.parametrize(
    ("metadata", "what"),
    [
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, "yarn"),
        ({"llama.expert_count": 8}, "experts"),
    ],
    ids=["yarn", "moe"],
)
def test_a_variant_that_would_compute_something_else_is_refused(
    metadata: dict[str, Any], what: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError) as caught:
        open_source(write_gguf(tmp_path / "tiny.gguf", "llama", metadata=metadata))
    one_line(caught.value, what, "safetensors")


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.0.attn_sinks.weight"])
def test_a_weight_the_model_has_no_place_for_is_refused(name: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "llama", tensors={name: np.zeros(64, np.float32)})
    with pytest.raises(UnsupportedError) as caught:
        open_source(path)
    one_line(caught.value, repr(name))


def test_foreign_rotary_factors_are_refused(tmp_path: Path) -> None:
    factors = np.linspace(1, 3, 8, dtype=np.float32)
    path = write_gguf(tmp_path / "tiny.gguf", "llama", tensors={"rope_freqs.weight": factors})
    with pytest.raises(UnsupportedError, match="rotary factors"):
        open_source(path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "llama", metadata={"llama.block_count": 4})
    with pytest.raises(CheckpointError) as caught:
        open_source(path)
    one_line(caught.value, "model.layers.3.", str(path))


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "llama", metadata={"llama.feed_forward_length": 96})
    with pytest.raises(CheckpointError) as caught:
        open_source(path)
    one_line(caught.value, "blk.0.ffn_gate.weight", "(128, 64)", "(96, 64)")


def test_a_file_without_a_vocabulary_has_no_tokenizer(tmp_path: Path) -> None:
    missing = {"tokenizer.ggml.tokens": None, "tokenizer.ggml.token_type": None, "tokenizer.ggml.merges": None}
    source = open_source(write_gguf(tmp_path / "tiny.gguf", "llama", metadata={**missing, "llama.vocab_size": 320}))
    with pytest.raises(ConfigError) as caught:
        source.load_tokenizer()
    one_line(caught.value, "tokenizer")


def test_the_fingerprint_follows_the_header_and_the_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "llama")
    first = open_source(path).fingerprint
    assert open_source(path).fingerprint == first
    write_gguf(path, "llama", name="Another")
    assert open_source(path).fingerprint != first


def test_neither_gguf_nor_accelerate_nor_sentencepiece_is_needed(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "gemma2", quantization="Q4_1")
    code = (
        "import sys\n"
        "for name in ('gguf', 'accelerate', 'sentencepiece', 'tiktoken'): sys.modules[name] = None\n"
        "from hetero.sources import open_source\n"
        "assert 'transformers' not in sys.modules\n"
        f"source = open_source({str(path)!r})\n"
        "source.build_model(), source.load_tokenizer()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_smollm2_config_names_and_extents(smollm2_gguf: Path) -> None:
    source = open_source(smollm2_gguf)
    assert len(source.params) == 272
    assert source.eos_token_ids == (2,)
    head, query = source.params[0], source.params[1]
    assert head.names == ("model.embed_tokens.weight", "lm_head.weight")
    assert (head.format, head.shape) == ("Q8_0", (49152, 576))
    assert (query.name, query.format, query.row_permutation) == (
        "model.layers.0.self_attn.q_proj.weight",
        "Q4_1",
        (9, 64),
    )
    assert sum(param.nbytes for param in source.params) == sum(t.nbytes for t in source.index.tensors.values())
    assert source.params[-1].name == "model.norm.weight"


@pytest.mark.slow
def test_smollm2_is_transformers(smollm2_gguf: Path) -> None:
    from transformers import AutoTokenizer

    source, expected = open_source(smollm2_gguf), reference(smollm2_gguf)
    assert_same_config(source.config, smollm2_gguf)
    assert_same_weights(source, expected)
    theirs = AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    assert_same_tokenizer(source.load_tokenizer(), theirs)
