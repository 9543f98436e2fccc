"""The generation loop: prompt pieces, one token at a time, text as soon as it is certain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from hetero.io.errors import ConfigError

if TYPE_CHECKING:
    from hetero.run import Run

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of the answer. Rates are tokens per second so far; the last segment alone has a `finish_reason`."""

    text: str
    token: int
    prompt_tokens: int
    prompt_tokens_per_s: float
    generation_tokens: int
    generation_tokens_per_s: float
    finish_reason: FinishReason | None


def stream_tokens(
    run: Run, ids: list[int], *, max_tokens: int, temperature: float, seed: int
) -> Iterator[tuple[int, float]]:
    """Yield (token id, seconds since the call) for up to `max_tokens` tokens; token ids in, token ids out.

    Prompts are read in pieces of the run's `prefill_tokens`, whatever the budgets, so the text is the same at each.
    """
    from transformers import DynamicCache

    start = perf_counter()
    device = run.device.torch_device
    model: Any = run.model
    cache = DynamicCache(config=model.config)
    noise = torch.Generator().manual_seed(seed)
    pieces = torch.split(torch.tensor([ids], device=device), run.decision.prefill_tokens, dim=1)
    logits = None
    for number, piece in enumerate(pieces, 1):
        logits = _forward(model, piece, cache)
        run.report_prefill(number, len(pieces))
    for count in range(1, max_tokens + 1):
        assert logits is not None
        token = _choose(logits, temperature, noise)
        yield token, perf_counter() - start
        if count < max_tokens:
            logits = _forward(model, torch.tensor([[token]], device=device), cache)


def stream_text(
    run: Run, prompt: str, *, max_tokens: int, temperature: float, seed: int, chat: bool
) -> Iterator[Segment]:
    """Yield text segments; see `Run.stream`."""
    if max_tokens < 1:
        raise ConfigError(f"max_tokens must be at least 1, got {max_tokens}")
    if not temperature >= 0:
        raise ConfigError(f"temperature must not be negative, got {temperature}")
    ids = encode_prompt(run.tokenizer, prompt, chat=chat)
    if not ids:
        raise ConfigError("the prompt has no tokens: give it some text")
    context = run.decision.context
    if len(ids) + max_tokens > context:
        if len(ids) >= context:
            raise ConfigError(
                f"the prompt has {len(ids)} tokens, which leaves no room for an answer in a context of {context}; "
                f"load with context={len(ids) + max_tokens}, or shorten the prompt"
            )
        max_tokens = context - len(ids)
    return _segments(run, ids, max_tokens, temperature, seed)


def _segments(run: Run, ids: list[int], max_tokens: int, temperature: float, seed: int) -> Iterator[Segment]:
    tokenizer, eos = run.tokenizer, set(run.source.eos_token_ids)
    tokens: list[int] = []
    shown = ""
    first_s = 0.0
    with torch.inference_mode():
        for token, elapsed_s in stream_tokens(run, ids, max_tokens=max_tokens, temperature=temperature, seed=seed):
            first_s = first_s or elapsed_s
            finish: FinishReason | None = None
            if token in eos:
                finish = "stop"
            else:
                tokens.append(token)
                if len(tokens) == max_tokens:
                    finish = "length"
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            # A replacement character at the end is half of a letter whose other bytes are still to come.
            certain = text if finish else text.rstrip("\ufffd")
            run.count_tokens(len(ids), first_s, len(tokens), elapsed_s - first_s)
            later = len(tokens) - 1
            yield Segment(
                text=certain[len(shown) :],
                token=token,
                prompt_tokens=len(ids),
                prompt_tokens_per_s=len(ids) / first_s,
                generation_tokens=len(tokens),
                generation_tokens_per_s=later / (elapsed_s - first_s) if later > 0 and elapsed_s > first_s else 0.0,
                finish_reason=finish,
            )
            shown = certain
            if finish:
                return


def encode_prompt(tokenizer: Any, prompt: str, *, chat: bool) -> list[int]:
    """Token ids of a prompt, in the model's chat template if it has one and `chat` is set."""
    if chat and getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return list(tokenizer(prompt)["input_ids"])


def _forward(model: Any, ids: Tensor, cache: Any) -> Tensor:
    """Logits of the last position, shape (vocab,). Grows the cache by the ids."""
    out = model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)
    logits: Tensor = out.logits[0, -1]
    return logits


def _choose(logits: Tensor, temperature: float, noise: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    probabilities = torch.softmax(logits.float().cpu() / temperature, dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=noise))
