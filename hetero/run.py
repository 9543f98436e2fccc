"""A loaded model: its passes, its text, its figures, its end."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from time import perf_counter
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn

from hetero.assembly import Assembly
from hetero.guard import Guard
from hetero.inference.generate import Segment, stream_text
from hetero.io.engine import EngineStats
from hetero.io.errors import CheckpointError, ConfigError, HeteroError
from hetero.memory.device import Device
from hetero.memory.schedule import stays_of
from hetero.memory.sizes import format_time
from hetero.memory.trace import NUM_PASSES_KEPT, Recorder
from hetero.planning import PlanReport
from hetero.report.progress import Progress, ProgressCallback
from hetero.report.stats import RunStats, Traffic
from hetero.report.timeline import CounterSample, Span, write_timeline
from hetero.setup import Setup
from hetero.tiers import Tiers

logger = logging.getLogger("hetero.run")

SLOW_FACTOR, SLOW_S = 5, 0.1
"""A pass that takes so many times what was expected, and so long, is worth a word."""


class Run:
    """A loaded model and everything that keeps it within its budgets. `close` releases all of it; idempotent.

    `model` is a transformers model whose parameters read NaN while their bytes are elsewhere; it computes on
    `device`'s torch device, without gradients, one thread at a time. What would see those NaN is refused (guard.py).
    A run that is dropped or still open at exit closes itself. A forward ended by KeyboardInterrupt is cleaned up when
    the next one starts; if the interrupt hit our own bookkeeping, the next one says that the run is unusable.
    """

    def __init__(self, setup: Setup, progress: ProgressCallback | None) -> None:
        self._stack = ExitStack()
        # Closed in reverse: hooks and executor, then engine and device, and the memory when nothing can write to it.
        self._memory = self._stack.enter_context(ExitStack())
        self._stack.enter_context(setup.stack.pop_all())
        # The stack must not refer to this object, or it would never be dropped.
        self._finalizer = weakref.finalize(self, _close_dropped, self._stack)
        self._progress = progress
        self.source, self.model, self.decision = setup.source, setup.model, setup.decision
        self.device, self._engine, self._files = setup.device, setup.engine, setup.files
        self.plan = PlanReport(self.decision)
        self.traffic = Traffic()
        self._tokenizer: Any = setup.tokenizer
        self._tokens = (0, 0.0, 0, 0.0)
        self._guard: Guard | None = None
        self._pass_lock = threading.Lock()
        self._pass_thread: int | None = None
        self._phase = ""
        self._expected_s = setup.decision.plan.prediction.time_s  # for a decode pass, before any was measured
        self._has_told = False  # that passes are slow
        self._is_closed = False
        try:
            self._build()
        except BaseException:
            self._stack.close()
            raise

    # -- building -----------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        decision = self.decision
        tiers = Tiers(
            decision,
            device=self.device,
            engine=self._engine,
            files=self._files,
            memory=self._memory,
            progress=self._progress,
        )
        self.ledger, self.arenas = tiers.ledger, tiers.arenas
        tiers.load_small(self.model)
        self.executor = tiers.make_executor()
        self._stack.callback(self.executor.close)
        self.recorder = Recorder(None if self.device.torch_device.type == "cpu" else partial(_settle, self.device))
        self._assembly = Assembly(
            self.model,
            decision,
            tiers=tiers,
            executor=self.executor,
            device=self.device,
            engine=self._engine,
            files=self._files,
            recorder=self.recorder,
        )
        if self._assembly.is_needed:
            modules = {name.rpartition(".")[0] for name in self._assembly.released}
            self._guard = Guard(self.model, modules, self.source.path)
            handles = [
                self.model.register_forward_pre_hook(self._begin_pass, with_kwargs=True),
                self.model.register_forward_hook(self._end_pass, always_call=True),
            ]
            for handle in handles:
                self._stack.callback(handle.remove)
            self.executor.prefetch()

    # -- passes -------------------------------------------------------------------------------------------------------

    def _begin_pass(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._enter_pass()
        self._check_files()
        ids = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs_embeds"))
        num_tokens = ids.shape[1] if isinstance(ids, Tensor) and ids.dim() > 1 else 1
        batch = ids.shape[0] if isinstance(ids, Tensor) and ids.dim() > 1 else 1
        self._check_size(batch, num_tokens, kwargs.get("cache", kwargs.get("past_key_values")))
        self._phase = "decode" if num_tokens == 1 else "prefill"
        self.recorder.begin(self._phase)
        self.traffic.begin(self._phase, num_tokens, self._totals())

    def _end_pass(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._pass_thread != threading.get_ident():  # this one was refused
            return
        self._pass_thread = None
        if output is None:
            self.recorder.abort()
            return
        self._check_files()  # what was read while a file changed is no answer
        self.traffic.end(self._totals())
        if self.recorder.end():
            streamed = set(self.decision.plan.schedule)
            self.executor.follow(stays_of(self.recorder.order(self._phase), streamed))
        if self._phase == "decode" and self.recorder.num_passes("decode") <= NUM_PASSES_KEPT:
            trace = self.recorder.trace("decode")
            assert trace is not None
            self.decision.measured(trace)
            self._tell_if_slow(self.traffic.passes[-1].time_s)

    def _tell_if_slow(self, time_s: float) -> None:
        """Say so, once, if one of the first decode passes takes many times what the machine promised."""
        if time_s > max(SLOW_S, SLOW_FACTOR * self._expected_s) and not self._has_told:
            self._has_told = True
            logger.warning(
                "a token takes %s where %s was expected, perhaps because other programs are busy and torch's threads "
                "wait for each other: then OMP_NUM_THREADS=1 or OMP_WAIT_POLICY=passive helps",
                format_time(time_s),
                format_time(self._expected_s),
            )

    def _check_size(self, batch: int, num_tokens: int, cache: Any) -> None:
        """Refuse a forward that would hold more than was reserved for keys, values and activations."""
        length = num_tokens + (cache.get_seq_length() if hasattr(cache, "get_seq_length") else 0)
        context, piece = self.decision.context, self.decision.prefill_tokens
        if batch * length > context:
            raise ConfigError(
                f"this forward holds {batch} x {length} tokens, but memory is reserved for context={context}; load "
                f"with context={batch * length} or more"
            )
        if batch * num_tokens > piece:
            raise ConfigError(
                f"this forward computes {batch} x {num_tokens} tokens at once, but memory is reserved for "
                f"prefill_tokens={piece}; give them in pieces, or load with prefill_tokens={batch * num_tokens}"
            )

    def _enter_pass(self) -> None:
        """Let one thread at a time in. A pass that this very thread has not ended was interrupted, and is cleaned up:
        torch calls no hook for a KeyboardInterrupt."""
        thread = threading.get_ident()
        with self._pass_lock:
            if self._pass_thread not in (None, thread):
                raise HeteroError(
                    "another thread is in the middle of a forward of this model, which takes one thread at a time: "
                    "wait for it, or load a second run"
                )
            was_interrupted = self._pass_thread == thread
            self._pass_thread = thread
        if was_interrupted:
            self.recorder.abort()
            self.executor.take_back()
            self._assembly.forget()

    def _check_files(self) -> None:
        for path, file in self._files.items():
            difference = file.difference()
            if difference is not None:
                raise CheckpointError(path, f"{difference}; load the model again")

    def _totals(self) -> dict[str, float]:
        stats = self.executor.stats
        useful = sum(file.useful_read_nbytes for file in self._engine.stats().files)
        return {"disk": useful, "gpu link": stats.copied_nbytes, "wait_s": stats.wait_s}

    # -- using --------------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer of this model. Raises ConfigError if the source has none."""
        if self._tokenizer is None:
            self._tokenizer = self.source.load_tokenizer()  # raises what is missing
        return self._tokenizer

    def stream(
        self, prompt: str, *, max_tokens: int = 256, temperature: float = 0.0, seed: int = 0, chat: bool = True
    ) -> Iterator[Segment]:
        """Answer `prompt`, yielding text as it is decided. `chat` applies the model's chat template if it has one.

        temperature 0 takes the likeliest token; otherwise the same seed gives the same text.
        """
        self._check_open()
        if not isinstance(prompt, str):
            raise ConfigError(f"prompt is a {type(prompt).__name__}, not text: answer one text after the other")
        return stream_text(self, prompt, max_tokens=max_tokens, temperature=temperature, seed=seed, chat=chat)

    def generate(self, prompt: str, **options: Any) -> str:
        """Answer `prompt` with a string; options as for `stream`."""
        return "".join(segment.text for segment in self.stream(prompt, **options))

    def stats(self) -> RunStats:
        """What has happened so far: tokens, rates, bytes per link and their limits, peaks per tier."""
        return RunStats.of(self)

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write what has been recorded as a Chrome trace; `record_timeline` must have been called before."""
        spans = [Span(name, lane, start, end) for lane, name, start, end in self.executor.spans or ()]
        counters = [CounterSample("bytes used", perf_counter(), {t: self.ledger.used(t) for t in self.ledger.tiers()})]
        write_timeline(path, [*spans, *self.traffic.spans], counters)

    def record_timeline(self) -> None:
        """Keep every transfer from now on for `trace`."""
        self.executor.spans = []

    @property
    def is_streaming(self) -> bool:
        """Whether anything of ours runs inside a forward; False when everything is resident and plain."""
        return self._assembly.is_needed

    def engine_stats(self) -> EngineStats:
        return self._engine.stats()

    def report_prefill(self, num_done: int, num_pieces: int) -> None:
        """Tell the progress callback how many pieces of the prompt have passed through the model."""
        if self._progress is not None:
            nbytes = self.decision.layout.weight_nbytes
            self._progress(Progress("prefill", num_done * nbytes, num_pieces * nbytes))

    def count_tokens(self, num_prompt: int, prompt_s: float, num_generated: int, generation_s: float) -> None:
        """Note how the present text stands, for `stats`."""
        self._tokens = (num_prompt, prompt_s, num_generated, generation_s)

    def token_counts(self) -> dict[str, Any]:
        num_prompt, prompt_s, num_generated, generation_s = self._tokens
        return {
            "prompt_tokens": num_prompt,
            "prompt_tokens_per_s": num_prompt / prompt_s if prompt_s else 0.0,
            "generation_tokens": num_generated,
            "generation_tokens_per_s": (num_generated - 1) / generation_s if generation_s else 0.0,
        }

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigError("this run is closed: load the model again")

    def close(self) -> None:
        """Stop transfers, release the weights, close files and devices. Blocks for what is in flight. Idempotent."""
        if self._is_closed:
            return
        if self._pass_thread not in (None, threading.get_ident()):
            raise HeteroError("another thread is in the middle of a forward of this model: wait for it, then close")
        self._is_closed = True
        try:
            self._assembly.remove()
            if self._guard is not None:
                self._guard.remove()
            self.model.to_empty(device="meta")
            self.model.register_forward_pre_hook(_refuse_closed)
        finally:
            self._stack.close()
            self._finalizer.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _refuse_closed(module: nn.Module, args: Any) -> None:
    raise HeteroError("the run of this model is closed and its weights are gone: load the model again")


def _close_dropped(stack: ExitStack) -> None:
    """Close a run that nobody holds any more, or that is open at exit."""
    if threading.current_thread() is threading.main_thread():
        stack.close()
    else:
        # The garbage collector may run on a thread that closing waits for.
        threading.Thread(target=stack.close, name="hetero-close").start()


def _settle(device: Device) -> None:
    """Block until all queued compute is done. Not `synchronize`, which would wait for prefetches too."""
    device.record().synchronize()
