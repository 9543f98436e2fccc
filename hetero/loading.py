"""hetero.load: a causal language model that runs inside its budgets, straight from the user's own file."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from hetero.binding import Leaser, ModuleBinding, RowBlockLinear, RowsParameter
from hetero.guard import Guard
from hetero.inference.generate import Segment, stream_text
from hetero.io.arena import Arena
from hetero.io.engine import Engine, EngineStats, File, Request
from hetero.io.errors import CheckpointError, ConfigError, HeteroError
from hetero.layout import Layout, Weight, build_layout, files_of
from hetero.materialize import Scratch, small_tensor
from hetero.measure import measure_compute, measure_disk, trim_heap
from hetero.memory.budget import Ledger, MemoryLimits, TierInfo, parse_size, resolve_budgets
from hetero.memory.device import ArenaLike, Device, open_device
from hetero.memory.executor import Executor
from hetero.memory.loader import ResidentLoader
from hetero.memory.plan_types import Links
from hetero.memory.residency import Placeholder, alias
from hetero.memory.ring import Ring
from hetero.memory.schedule import runs_of
from hetero.memory.trace import Recorder
from hetero.memory.transfer import finish
from hetero.planning import (
    PREFILL_TOKENS,
    ROWS_NBYTES,
    Decision,
    PlanReport,
    Wishes,
    decide,
    formats_of,
)
from hetero.report.stats import RunStats, Traffic
from hetero.report.timeline import CounterSample, Span, write_timeline
from hetero.sources import Source, open_source

DEFAULT_CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a long phase is. Sizes are bytes; in "prefill" they are those of the weights passed."""

    phase: Literal["load", "prefill", "decode"]
    done_nbytes: int
    total_nbytes: int
    message: str = ""


ProgressCallback = Callable[[Progress], None]


class Setup:
    """What a plan and a load both need: the source, the device, the limits. Owns device, engine and files."""

    def __init__(
        self,
        path_or_id: str | os.PathLike[str],
        *,
        device: str,
        gpu_memory: int | str,
        cpu_memory: int | str,
        disk: str | os.PathLike[str] | None,
        dtype: str | torch.dtype,
        link: int | str | None,
        wishes: Wishes,
        trust_remote_code: bool,
        revision: str | None = None,
        latency_s: float = 0.0,
        disk_bytes_per_s: float | None = None,
    ) -> None:
        if disk is not None and not Path(disk).is_dir():
            raise ConfigError(f"disk={os.fspath(disk)!r} is not a folder: create it first")
        self.stack = ExitStack()
        try:
            self.source = open_source(path_or_id, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code)
            self.model = self.source.build_model()
            self.device = self._open_device(device, gpu_memory, link, latency_s)
            self.stack.callback(self.device.close)
            # What the libraries take for themselves they take now: it is part of the baseline, not of the budgets.
            self.tokenizer = _tokenizer_of(self.source)
            self.rates = measure_compute(self.source.dtype, formats_of(self.source))
            trim_heap()
            self.limits = self._limits(device, gpu_memory, cpu_memory)
            self.engine = self.stack.enter_context(Engine())
            self.files = self._open_files()
            self.links = self._links(disk_bytes_per_s)
            self.decision = decide(
                self.source,
                self.model,
                limits=self.limits,
                links=self.links,
                rates=self.rates,
                wishes=wishes,
                io_nbytes=self.engine.bounce_nbytes,
                device_name=self.device.name,
            )
        except BaseException:
            self.stack.close()
            raise

    def _open_device(self, name: str, gpu_memory: int | str, link: int | str | None, latency_s: float) -> Device:
        rate = None if link is None else float(_parse_rate(link))
        capacity = None
        if name == "emulated" and gpu_memory != "auto":
            capacity = parse_size(gpu_memory, name="gpu_memory")
        return open_device(name, capacity_nbytes=capacity, bandwidth_bytes_per_s=rate, latency_s=latency_s)

    def _limits(self, name: str, gpu_memory: int | str, cpu_memory: int | str) -> MemoryLimits:
        gpu = None
        if self.device.has_gpu_tier:
            free, total = self.device.memory_info()
            gpu = TierInfo(total_nbytes=total, available_nbytes=free, limit_source=self.device.name)
        return resolve_budgets(gpu_memory, cpu_memory, gpu=gpu)

    def _open_files(self) -> dict[Path, File]:
        layout = build_layout(self.source, self.model, 1 << 62)
        files = {path: self.engine.open(path) for path in sorted(files_of(layout))}
        check_identity(self.source, files)
        return files

    def _links(self, disk_bytes_per_s: float | None) -> Links:
        disk = disk_bytes_per_s or measure_disk(self.engine, self.files)
        if not self.device.has_gpu_tier:
            return Links(disk)
        known = self.device.link_info()
        return Links(
            disk, known.bandwidth_bytes_per_s or measure_link(self.device), gpu_latency_s=known.latency_s or 0.0
        )


def _tokenizer_of(source: Source) -> Any:
    """The source's tokenizer, or None: token ids go through a model without one."""
    try:
        return source.load_tokenizer()
    except ConfigError:
        return None


def _parse_rate(link: int | str) -> int:
    text = link.strip().removesuffix("/s") if isinstance(link, str) else link
    return parse_size(text, name="link")


def measure_link(device: Device) -> float:
    """Bytes per second of copies from page-locked memory to the device. Blocks for some 30 ms."""
    nbytes = 32 << 20
    free, _ = device.memory_info()
    nbytes = max(4096, min(nbytes, free // 4 // 4096 * 4096))
    host = device.allocate_host(nbytes, name="link probe")
    try:
        target = device.allocate(nbytes, name="link probe")
        try:
            device.copy(target.address, host.address, nbytes, to_device=True).synchronize()
            start = perf_counter()
            for _ in range(3):
                event = device.copy(target.address, host.address, nbytes, to_device=True)
            event.synchronize()
            return 3 * nbytes / (perf_counter() - start)
        finally:
            target.close()
    finally:
        host.close()


def check_identity(source: Source, files: Mapping[Path, File]) -> None:
    """Raise CheckpointError when a file is not the one whose header was read."""
    for path, file in files.items():
        difference = source.index.files[path].difference(file.identity)
        if difference is not None:
            raise CheckpointError(path, f"{difference}; load the model again")


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
        self._bindings: list[ModuleBinding] = []
        self._tokens = (0, 0.0, 0, 0.0)
        self._guard: Guard | None = None
        self._rows_memory: tuple[ArenaLike, Tensor] | None = None
        self._pass_lock = threading.Lock()
        self._pass_thread: int | None = None
        self._is_closed = False
        try:
            self._build()
        except BaseException:
            self._stack.close()
            raise

    # -- building -----------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        decision = self.decision
        self.ledger = Ledger(decision.limits.ledger_limits())
        self.ledger.note("interpreter and libraries", decision.limits.baseline.total_nbytes)
        for tier, holders in decision.reserves.holders.items():
            for holder, nbytes in holders.items():
                self.ledger.take(tier, holder, nbytes)
        self._load_small()
        self._make_tiers()
        self._bind()

    def _allocate(self, tier: str, nbytes: int, name: str, *, is_reserved: bool = False) -> ArenaLike:
        if not is_reserved:
            self.ledger.take(tier, name, nbytes)
            self._memory.callback(self.ledger.give, tier, name, nbytes)
        allocate = self.device.allocate if tier == "gpu" else self.device.allocate_host
        arena = allocate(nbytes, name=name)
        self._memory.callback(arena.close)
        return arena

    def _load_small(self) -> None:
        """Read vectors and other small parameters; they keep their file offset modulo 64."""
        layout, dtype = self.decision.layout, self.source.dtype
        offsets: list[int] = []
        cursor = 0
        for param in layout.small:
            residue = param.pieces[0].tensor.offset % 64 if len(param.pieces) == 1 else 0
            cursor += (residue - cursor) % 64
            offsets.append(cursor)
            cursor += param.nbytes
        if not layout.small:
            return
        # An arena, not torch's memory: it stays mapped when a stuck disk may still write to it.
        memory = torch.from_numpy(Arena(max(cursor, 1), name="small weights").array)
        requests = [
            Request(
                self._files[piece.tensor.path],
                piece.tensor.offset,
                piece.tensor.nbytes,
                memory.data_ptr() + offset + piece.dst_offset,
            )
            for param, offset in zip(layout.small, offsets, strict=True)
            for piece in param.pieces
        ]
        finish(self._engine.submit(requests))
        for param, offset in zip(layout.small, offsets, strict=True):
            value = small_tensor(param, memory[offset : offset + param.nbytes], dtype).to(self.device.torch_device)
            shared = nn.Parameter(value, requires_grad=False) if param.kind == "parameter" else value
            for name in param.names:
                _set(self.model, name, shared)
        for name, buffer in list(self.model.named_buffers()):
            if buffer.device != self.device.torch_device:
                _set(self.model, name, buffer.to(self.device.torch_device))

    def _make_tiers(self) -> None:
        decision, plan = self.decision, self.decision.plan
        chunks = {chunk.chunk_id: chunk for chunk in decision.layout.chunks}
        sizes = {i: chunk.nbytes for i, chunk in chunks.items()}
        ring_nbytes = {"gpu": plan.gpu_ring_nbytes, "cpu": plan.cpu_ring_nbytes}
        residents = {"gpu": sorted(plan.gpu_resident), "cpu": sorted(plan.cpu_resident)}
        places: dict[str, dict[int, int]] = {"gpu": {}, "cpu": {}}
        rings: dict[str, Ring] = {}
        arenas: dict[str, ArenaLike] = {}
        for tier in ("gpu", "cpu") if decision.has_gpu_tier else ("cpu",):
            total = sum(sizes[i] for i in residents[tier]) + ring_nbytes[tier]
            arena = self._allocate(tier, total, "weights") if total else None
            address = arena.address if arena else 0
            if arena:
                arenas[tier] = arena
            for chunk_id in residents[tier]:
                places[tier][chunk_id] = address
                address += sizes[chunk_id]
            rings[tier] = Ring(address, ring_nbytes[tier])
        self._arenas = arenas
        self._load_residents(places, arenas)
        first = decision.first_tier
        moments = [moment.chunk_ids for moment in decision.trace.moments]
        self.executor = Executor(
            decision.layout.chunks,
            device=self.device,
            engine=self._engine,
            files=self._files,
            first=rings[first],
            staging=rings["cpu"] if first == "gpu" else None,
            resident=places[first],
            host=places["cpu"] if first == "gpu" else {},
            schedule=runs_of(moments, set(plan.schedule)),
            keepers=[arenas[first].keeper] if first in arenas else [],
        )
        self._stack.callback(self.executor.close)

    def _load_residents(self, places: Mapping[str, Mapping[int, int]], arenas: Mapping[str, ArenaLike]) -> None:
        chunks = {chunk.chunk_id: chunk for chunk in self.decision.layout.chunks}
        total = sum(chunks[i].read_nbytes for tier in places.values() for i in tier)
        loader = ResidentLoader(self._engine, self._files, self.device)

        def tell(done_nbytes: int) -> None:
            if self._progress is not None:
                self._progress(Progress("load", done_nbytes, total))

        tell(0)
        if places["gpu"]:
            self._load_through(loader, [(chunks[i], address) for i, address in places["gpu"].items()], arenas, tell)
        loader.load([(chunks[i], address) for i, address in places["cpu"].items()], progress=tell)
        tell(total)

    def _load_through(
        self, loader: ResidentLoader, chunks: list[Any], arenas: Mapping[str, ArenaLike], tell: Callable[[int], None]
    ) -> None:
        """Gpu residents come through the cpu arena before anything else lives there, or through a passing one."""
        largest = max(chunk.nbytes for chunk, _ in chunks)
        arena = arenas.get("cpu")
        if arena is not None and arena.nbytes >= largest:
            loader.load(chunks, staging=Ring(arena.address, arena.nbytes), progress=tell)
            return
        with self.ledger.hold("cpu", "load staging", largest):
            passing = self.device.allocate_host(largest, name="load staging")
            try:
                loader.load(chunks, staging=Ring(passing.address, passing.nbytes), progress=tell)
            finally:
                passing.close()

    def _bind(self) -> None:
        layout, torch_device = self.decision.layout, self.device.torch_device
        self.recorder = Recorder(None if torch_device.type == "cpu" else self.device.synchronize)
        scratch = Scratch(self.decision.scratch_nbytes, torch_device)
        self._leaser = Leaser(self.executor, layout, scratch, self.recorder)
        weights = {**layout.weights, **layout.tables}
        largest = max((w.source.nbytes // w.row_nbytes * w.num_cols * 8 for w in weights.values()), default=16)
        self._placeholder = Placeholder(largest)
        by_name = {name: weight for weight in weights.values() for name in weight.source.names}
        parameters = {name: self._parameter(weight) for name, weight in weights.items()}
        for name, weight in by_name.items():
            _set(self.model, name, parameters[weight.source.name])
        for path, module in list(self.model.named_modules()):
            self._bind_module(path, module, by_name)
        if self.executor_is_needed:
            released = [n for n, p in self.model.named_parameters(remove_duplicate=False) if self._placeholder.holds(p)]
            self._guard = Guard(self.model, {name.rpartition(".")[0] for name in released}, self.source.path)
            handles = [
                self.model.register_forward_pre_hook(self._begin_pass, with_kwargs=True),
                self.model.register_forward_hook(self._end_pass, always_call=True),
            ]
            for handle in handles:
                self._stack.callback(handle.remove)
            self.executor.prefetch()

    @property
    def executor_is_needed(self) -> bool:
        """Whether anything of ours runs inside a forward."""
        return bool(self._bindings) or any(isinstance(m, RowBlockLinear) for m in self.model.modules())

    def _is_fixed(self, weight: Weight) -> bool:
        return weight.is_plain and not weight.is_split and self.executor.is_resident(weight.chunk_ids[0])

    def _parameter(self, weight: Weight) -> nn.Parameter:
        if self._is_fixed(weight):
            with self.executor.lease(weight.chunk_ids) as (entry,):
                return nn.Parameter(self._leaser.tensor(weight, entry), requires_grad=False)
        shape = weight.source.shape
        strides = torch.empty(shape, device="meta").stride()
        released = self._placeholder.tensor(shape, strides, weight.dtype)
        if self._is_table(weight):
            return RowsParameter.over(released, self._rows_of(weight))
        return nn.Parameter(released, requires_grad=False)

    def _is_table(self, weight: Weight) -> bool:
        modules = (self.model.get_submodule(name.rpartition(".")[0]) for name in weight.source.names)
        return any(isinstance(module, nn.Embedding) for module in modules)

    def _rows_of(self, weight: Weight) -> Any:
        from hetero.rows import TableRows

        if self._rows_memory is None:
            buffer = self._allocate("cpu", ROWS_NBYTES, "embedding rows", is_reserved=True)
            self._rows_memory = buffer, alias(buffer.address, ROWS_NBYTES, torch.device("cpu"), lambda: None)
        buffer, buffer_bytes = self._rows_memory
        return TableRows(
            weight,
            self.decision.layout,
            self.executor,
            self._engine,
            self._files,
            buffer,
            buffer_bytes,
            self.device.torch_device,
        )

    def _bind_module(self, path: str, module: nn.Module, by_name: Mapping[str, Weight]) -> None:
        owned = []
        for name, parameter in module._parameters.items():
            weight = by_name.get(f"{path}.{name}" if path else name)
            if weight is not None and parameter is not None and not self._is_fixed(weight):
                owned.append((parameter, weight))
        if not owned or isinstance(module, nn.Embedding):
            return
        if any(weight.is_split for _, weight in owned):
            assert type(module) is nn.Linear
            self.model.set_submodule(path, RowBlockLinear.over(module, path, owned[0][1], self._leaser))
        else:
            self._bindings.append(ModuleBinding(path, module, owned, self._leaser, self._placeholder))

    # -- passes -------------------------------------------------------------------------------------------------------

    def _begin_pass(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._enter_pass()
        self._check_files()
        ids = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs_embeds"))
        num_tokens = ids.shape[1] if isinstance(ids, Tensor) and ids.dim() > 1 else 1
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
            trace = self.recorder.trace(self._phase)
            assert trace is not None
            streamed = set(self.decision.plan.schedule)
            self.executor.follow(runs_of([moment.chunk_ids for moment in trace.moments], streamed))

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
            for binding in self._bindings:
                binding.forget()

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
        self._is_closed = True
        for binding in self._bindings:
            binding.remove()
        if self._guard is not None:
            self._guard.remove()
        self.model.to_empty(device="meta")
        self.model.register_forward_pre_hook(_refuse_closed)
        self._rows_memory = None
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


def _set(model: nn.Module, name: str, value: Tensor) -> None:
    """Put a parameter or a buffer where `name` says, without a copy."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path) if path else model
    holder = module._parameters if leaf in module._parameters else module._buffers
    holder[leaf] = value  # type: ignore[assignment]


__all__ = ["Decision", "Layout", "Progress", "Run", "load", "plan"]
