"""What people do to a model that hetero.load gave them: it works exactly, or it is refused by name."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import hetero
from hetero.binding import RowBlockLinear
from hetero.io.errors import ConfigError, HeteroError, OutOfMemoryError, UnsupportedError
from tests.bad_days.rig import DEVICES, IDS, load, logits_of
from tests.tiny_models import write_checkpoint

pytestmark = pytest.mark.usefixtures("no_leaks")

REFUSED: dict[str, Callable[[Any, Path], object]] = {
    "state_dict": lambda model, folder: model.state_dict(),
    "state_dict of a layer": lambda model, folder: model.model.layers[1].state_dict(),
    "state_dict of the embedding": lambda model, folder: model.model.embed_tokens.state_dict(),
    "load_state_dict": lambda model, folder: model.load_state_dict(dict(model.named_parameters())),
    "load_state_dict(assign)": lambda model, folder: model.load_state_dict(dict(model.named_parameters()), assign=True),
    "save_pretrained": lambda model, folder: model.save_pretrained(folder / "saved"),
    "torch.save": lambda model, folder: torch.save(model, folder / "saved.pt"),
    "pickle": lambda model, folder: pickle.dumps(model),
    "pickle of a layer": lambda model, folder: pickle.dumps(model.model.layers[0]),
    "deepcopy": lambda model, folder: copy.deepcopy(model),
    "half": lambda model, folder: model.half(),
    "double": lambda model, folder: model.double(),
    "to dtype": lambda model, folder: model.to(torch.bfloat16),
    "to meta": lambda model, folder: model.to("meta"),
    "to_empty": lambda model, folder: model.to_empty(device="cpu"),
    "share_memory": lambda model, folder: model.share_memory(),
    "a layer to dtype": lambda model, folder: model.model.layers[2].to(torch.float16),
}


@pytest.fixture(scope="module", params=DEVICES)
def run(request: pytest.FixtureRequest, checkpoint: Path) -> Any:
    with load(checkpoint, request.param) as run:
        yield run


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_see_released_weights_is_refused(
    run: hetero.Run, checkpoint: Path, reference: torch.Tensor, tmp_path: Path, what: str
) -> None:
    with pytest.raises(UnsupportedError, match="whose weights stream") as caught:
        REFUSED[what](run.model, tmp_path)
    assert f"untouched at {checkpoint}" in str(caught.value)
    assert not (tmp_path / "saved").exists()
    assert torch.equal(logits_of(run.model), reference)


@pytest.mark.parametrize("same", ["cpu", torch.float32, torch.device("cpu")], ids=str)
def test_a_conversion_to_what_it_is_changes_nothing(run: hetero.Run, reference: torch.Tensor, same: Any) -> None:
    assert run.model.to(same) is run.model
    assert torch.equal(logits_of(run.model), reference)


def test_a_guarded_model_has_no_other_hook_or_attribute_once_closed(checkpoint: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(checkpoint)
    run = load(checkpoint)
    run.close()
    for (path, closed), module in zip(run.model.named_modules(), plain.modules(), strict=True):
        left = set(closed.__dict__) - set(module.__dict__)
        assert not left or type(closed) is RowBlockLinear, f"{path}: {left}"
        assert not closed._forward_hooks and not closed._state_dict_pre_hooks, path
        assert len(closed._forward_pre_hooks) == (path == ""), path


def test_a_resident_model_is_an_ordinary_one(checkpoint: Path, reference: torch.Tensor, tmp_path: Path) -> None:
    with hetero.load(checkpoint, device="cpu", cpu_memory="64MiB", context=64) as run:
        assert not run.is_streaming
        copied = copy.deepcopy(run.model)
        run.model.save_pretrained(tmp_path)
        embeddings = run.model.model.embed_tokens(IDS).detach().requires_grad_()
        run.model(inputs_embeds=embeddings).logits.sum().backward()
        assert embeddings.grad is not None and embeddings.grad.isfinite().all()
    assert torch.equal(logits_of(copied), reference)
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path)), reference)


def test_transformers_generate_is_our_greedy_loop(run: hetero.Run) -> None:
    ids = run.tokenizer("w5 w6 w7", return_tensors="pt")["input_ids"]
    theirs = run.model.generate(input_ids=ids, max_new_tokens=6, do_sample=False, eos_token_id=None)
    ours = [segment.token for segment in run.stream("w5 w6 w7", max_tokens=6)]
    assert ours == theirs[0, ids.shape[1] :].tolist()[: len(ours)] and len(ours) > 2


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode], ids=lambda m: m.__name__)
def test_every_grad_mode_gives_the_same_bits(run: hetero.Run, reference: torch.Tensor, mode: Any) -> None:
    with mode():
        assert torch.equal(run.model(input_ids=IDS).logits, reference)


def test_gradients_through_streamed_weights_are_refused(run: hetero.Run, reference: torch.Tensor) -> None:
    embeddings = torch.randn(1, 5, 64, requires_grad=True)
    with pytest.raises(UnsupportedError, match=r"torch\.no_grad"):
        run.model(inputs_embeds=embeddings)
    with torch.no_grad():
        run.model(inputs_embeds=embeddings)
    run.model.requires_grad_(True)
    with pytest.raises(UnsupportedError, match="requires_grad_"):
        run.model(input_ids=IDS)
    run.model.requires_grad_(False)
    assert torch.equal(logits_of(run.model), reference)


def test_gradients_are_refused_where_the_parameter_itself_is_saved(tmp_path: Path) -> None:
    # GPT-2's Conv1D saves its weight, not a view: without the refusal backward would read NaN.
    with load(write_checkpoint(tmp_path / "gpt2", "gpt2")) as run, pytest.raises(UnsupportedError):
        run.model(inputs_embeds=torch.randn(1, 5, 64, requires_grad=True)).logits.sum().backward()


def test_after_close_everything_says_so(checkpoint: Path) -> None:
    run = load(checkpoint)
    segments = run.stream("w5 w6", max_tokens=4)
    next(segments)
    run.close()
    run.close()
    for use in (
        lambda: logits_of(run.model),
        lambda: run.model.generate(input_ids=IDS, max_new_tokens=2),
        lambda: run.generate("w5"),
        lambda: next(segments),
    ):
        with pytest.raises(HeteroError, match=r"closed.*load the model again"):
            use()
    assert run.stats().to_dict()["num_passes"] == 1
    assert "prefill" in str(run.plan)


def test_a_stream_left_half_way_does_not_hold_up_the_next(run: hetero.Run) -> None:
    expected = run.generate("w8 w9", max_tokens=3)
    segments = run.stream("w5 w6 w7", max_tokens=20)
    next(segments)
    assert run.generate("w8 w9", max_tokens=3) == expected
    next(segments)
    segments.close()
    assert run.generate("w8 w9", max_tokens=3) == expected


def test_another_thread_may_use_it_next(run: hetero.Run, reference: torch.Tensor) -> None:
    answers: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: answers.append(logits_of(run.model)))
    thread.start()
    thread.join()
    assert torch.equal(answers[0], reference)
    assert torch.equal(logits_of(run.model), reference)


def test_a_second_thread_at_the_same_time_is_refused_and_disturbs_nothing(
    run: hetero.Run, reference: torch.Tensor
) -> None:
    errors: list[BaseException] = []

    def intrude() -> None:
        try:
            logits_of(run.model)
        except HeteroError as error:
            errors.append(error)

    def start_intruder(*_: Any) -> None:
        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()

    handle = run.model.model.layers[1].register_forward_hook(start_intruder)
    try:
        assert torch.equal(logits_of(run.model), reference)
    finally:
        handle.remove()
    assert ["one thread at a time" in str(error) for error in errors] == [True]
    assert torch.equal(logits_of(run.model), reference)


@pytest.mark.parametrize("where", ["model.layers.1.mlp.up_proj", "model.layers.2", "lm_head", "model.embed_tokens", ""])
@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
def test_an_exception_in_a_hook_releases_what_was_leased(
    run: hetero.Run, reference: torch.Tensor, where: str, is_before: bool
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("the user's")

    module = run.model.get_submodule(where)
    for _ in range(30):  # more often than the ring has room for leases that were kept
        handle = (module.register_forward_pre_hook if is_before else module.register_forward_hook)(fail)
        with pytest.raises(RuntimeError, match="the user's"):
            logits_of(run.model)
        handle.remove()
    assert torch.equal(logits_of(run.model), reference)


@pytest.mark.parametrize("device", DEVICES)
def test_a_kept_view_of_a_weight_keeps_its_numbers_also_after_close(checkpoint: Path, device: str) -> None:
    name = "model.layers.1.mlp.up_proj"
    weight = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()[f"{name}.weight"]
    kept: list[torch.Tensor] = []
    run = load(checkpoint, device)
    handle = run.model.get_submodule(name).register_forward_pre_hook(lambda module, _: kept.append(module.weight.data))
    with pytest.raises(OutOfMemoryError, match="referenced by a tensor outside the model") as caught:
        for _ in range(2):  # the ring has room for nothing beside the kept chunk
            logits_of(run.model)
    handle.remove()
    assert torch.equal(kept[0], weight)
    kept_for_ever = kept.pop(0)
    kept.clear()
    del caught, handle
    run.close()
    del run
    gc.collect()
    assert torch.equal(kept_for_ever, weight)


@pytest.mark.parametrize("device", DEVICES)
def test_a_run_recovers_when_a_kept_view_is_dropped(checkpoint: Path, reference: torch.Tensor, device: str) -> None:
    kept: list[torch.Tensor] = []
    with load(checkpoint, device) as run:
        module = run.model.model.layers[1].mlp.up_proj
        handle = module.register_forward_pre_hook(lambda module, _: kept.append(module.weight.data))
        with pytest.raises(OutOfMemoryError):
            for _ in range(2):
                logits_of(run.model)
        handle.remove()
        kept.clear()
        assert torch.equal(logits_of(run.model), reference)


def test_a_model_kept_without_its_run_goes_on(checkpoint: Path, reference: torch.Tensor) -> None:
    for cpu_memory in (5_800_000, "64MiB"):
        model = hetero.load(checkpoint, device="cpu", cpu_memory=cpu_memory, context=64).model
        gc.collect()
        assert torch.equal(logits_of(model), reference)
        del model
        gc.collect()


def test_a_dropped_run_is_collected_with_its_threads_and_files(checkpoint: Path, no_memory_left: None) -> None:
    for device in DEVICES:
        run = load(checkpoint, device)
        logits_of(run.model)
        del run
        gc.collect()


@pytest.mark.parametrize("ids", [[[320]], [[-1]], [[5, 1 << 40]]], ids=["end", "negative", "huge"])
def test_a_token_outside_the_table_is_an_error_and_no_more(
    run: hetero.Run, reference: torch.Tensor, ids: list[list[int]]
) -> None:
    with pytest.raises(IndexError, match="outside the table of 320 rows"), torch.no_grad():
        run.model(input_ids=torch.tensor(ids))
    assert torch.equal(logits_of(run.model), reference)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temp"),
    ],
    ids=["no tokens", "negative temperature", "nan temperature"],
)
def test_wrong_generation_options_are_refused(run: hetero.Run, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run.generate("w5", **options)


def test_a_prompt_longer_than_the_context_is_refused_with_the_context_it_needs(run: hetero.Run) -> None:
    with pytest.raises(ConfigError, match=r"has 100 tokens.*context of 64.*context=110"):
        run.generate(" ".join(["w5"] * 100), max_tokens=10)
    with pytest.raises(ConfigError, match="no tokens"):
        run.generate("")
