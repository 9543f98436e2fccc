"""hetero.load and hetero.plan: a causal language model inside its budgets, straight from the user's own file."""

from __future__ import annotations

import os

import torch

from hetero.planning import PREFILL_TOKENS, PlanReport, Wishes
from hetero.report.progress import Progress, ProgressCallback
from hetero.run import Run
from hetero.setup import Setup

__all__ = ["Progress", "Run", "load", "plan"]

DEFAULT_CONTEXT = 2048


def load(
    path_or_id: str | os.PathLike[str],
    *,
    device: str = "auto",
    gpu_memory: int | str = "auto",
    cpu_memory: int | str = "auto",
    disk: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype = "auto",
    context: int = DEFAULT_CONTEXT,
    prefill_tokens: int = PREFILL_TOKENS,
    chunk_nbytes: int | None = None,
    link: int | str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    progress: ProgressCallback | None = None,
) -> Run:
    """Load a causal language model inside memory budgets; close the returned run, or use it as a context manager.

    path_or_id: a folder of safetensors, a .gguf file, or a hub id. Its files are read in place, never copied.
    gpu_memory, cpu_memory: hard limits on everything hetero allocates, like "6GiB", "80%", "auto" or bytes.
    device: "auto", "cpu", "cuda", "xpu", or "emulated": a GPU tier made of RAM, with `link` as its speed ("12GB/s").
    disk: a folder for data that changes. Inference changes nothing and writes nothing; it is only checked to exist.
    context: the longest text, in tokens, prompt included; its keys and values are part of the budget.
    prefill_tokens: prompts are read in pieces of this many tokens; the bits of a result depend on it, not on budgets.
    chunk_nbytes: largest chunk; None lets the plan choose.

    Blocks while residents are read; `progress` is called from this thread. Raises ConfigError (with the smallest
    budgets that work), CheckpointError, UnsupportedError, IOEngineError; nothing stays open then.
    """
    wishes = Wishes(context=context, prefill_tokens=prefill_tokens, chunk_nbytes=chunk_nbytes)
    setup = Setup(
        path_or_id,
        device=device,
        gpu_memory=gpu_memory,
        cpu_memory=cpu_memory,
        disk=disk,
        dtype=dtype,
        link=link,
        wishes=wishes,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    return Run(setup, progress)


def plan(
    path_or_id: str | os.PathLike[str],
    *,
    device: str = "auto",
    gpu_memory: int | str = "auto",
    cpu_memory: int | str = "auto",
    disk: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype = "auto",
    context: int = DEFAULT_CONTEXT,
    prefill_tokens: int = PREFILL_TOKENS,
    chunk_nbytes: int | None = None,
    link: int | str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> PlanReport:
    """Say where every byte would live and how fast the model would run, from headers only. Arguments as for `load`.

    Reads no weights but a probe of the disk's rate (0.1 s). Raises as `load` does.
    """
    setup = Setup(
        path_or_id,
        device=device,
        gpu_memory=gpu_memory,
        cpu_memory=cpu_memory,
        disk=disk,
        dtype=dtype,
        link=link,
        wishes=Wishes(context=context, prefill_tokens=prefill_tokens, chunk_nbytes=chunk_nbytes),
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    setup.stack.close()
    return PlanReport(setup.decision)
