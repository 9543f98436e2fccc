"""A wrapped model: its passes, its plan, its figures, its end."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from time import perf_counter
from types import TracebackType
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from hetero.hooks import PassHooks
from hetero.io.engine import Engine
from hetero.io.errors import HeteroError
from hetero.io.scratch import ScratchStore
from hetero.iteration import BACKWARD, FORWARD, TRAIN, IterationPlanner
from hetero.memory.activations import ACTIVATIONS, ActivationStore, Policy
from hetero.memory.autograd import Interception, SavedTensors
from hetero.memory.budget import Ledger, MemoryLimits
from hetero.memory.device import Device
from hetero.memory.gradients import GRADIENTS, Gradients
from hetero.memory.plan_types import Links
from hetero.memory.schedule import Stay, stays_of
from hetero.memory.trace import Recorder
from hetero.memory.weights import WeightChunk
from hetero.needs import Needs
from hetero.outside import OutsideReads
from hetero.report.progress import Progress, ProgressCallback
from hetero.report.timeline import CounterSample, Span, write_timeline
from hetero.report.wrapped import TierUse, WrapPlan, WrapStats
from hetero.streaming import Lease, Streaming
from hetero.turns import Holder

OTHERS, BOUNCE = "buffers and small weights", "i/o bounce buffers"
NUM_SPANS_KEPT = 1 << 14
PATIENCE_S = 0.5
"""How long `close` waits for another thread's pass to end."""

_live: list[WrappedRun] = []  # until closed: a run must not end because nobody keeps its handle


class _Backward(NamedTuple):
    """One that is under way: `end` is dead when it has ended or raised. Behind a gpu tier a thread of torch's runs it,
    and the caller's waits; `task` is torch's number of it."""

    thread: int
    task: int
    end: weakref.ref[Callable[[], None]]
    turn_before: Holder | None
    start_s: float


class WrappedRun:
    """A model inside budgets, until `close`: idempotent, also by `with`, and at exit.

    `model` is the caller's own module, in place. Outside a pass its parameters are plain tensors with their true
    values. Threads take turns: a forward or a backward waits for that of another thread. The first iteration is the
    warm-up: it streams what does not fit and records; then the plan takes over, and is made again when a phase is new
    or something did not fit.
    """

    def __init__(
        self,
        model: nn.Module,
        chunks: Sequence[WeightChunk],
        *,
        device: Device,
        engine: Engine,
        store: ScratchStore | None,
        limits: MemoryLimits,
        links: Links,
        activations: Policy,
        progress: ProgressCallback | None,
        resources: ExitStack,
    ) -> None:
        self.model, self.limits, self.links = model, limits, links
        self._device, self._engine, self._store, self._progress = device, engine, store, progress
        self.pid = os.getpid()
        self._resources = resources
        self._is_closed = False
        self._is_due = False  # the plan, at the next pass
        self._is_short = False  # of room for activations, beside rings that the plan made
        self._is_unsettled = False
        self.num_plans = 0
        self.num_passes = dict.fromkeys((FORWARD, TRAIN, BACKWARD), 0)
        self._pass: tuple[str, float] | None = None
        self._in_backward: list[bool] = []
        self._backward: _Backward | None = None
        self._on_stacks: list[list[Interception | OutsideReads]] = []  # of torch's, for each pass under way
        self._spans: deque[Span] = deque(maxlen=NUM_SPANS_KEPT)
        self._names = {id(module): path or type(module).__name__ for path, module in model.named_modules()}
        moving = {id(view.parameter) for chunk in chunks for view in chunk.views}
        others = [p for p in model.parameters() if id(p) not in moving] + list(model.buffers())
        self._others = others if device.torch_device.type != "cpu" else []
        self._others_nbytes = _nbytes(others)
        self._trainable_nbytes = _nbytes([p for p in model.parameters() if p.requires_grad])
        self._persistent: set[int] = set()
        self._hooks = PassHooks(model, self)
        self._watched: set[int] = set()  # chunks that tensors outside the model looked at when the last pass began
        self.ledger = Ledger(limits.ledger_limits() | ({"disk": store.nbytes} if store is not None else {}))
        self.ledger.note("interpreter and libraries", limits.baseline.total_nbytes)
        self.recorder = Recorder(None if device.torch_device.type == "cpu" else partial(_settle, device))
        try:
            self.streaming = Streaming(
                model,
                chunks,
                device=device,
                engine=engine,
                store=store,
                ledger=self.ledger,
                reserve=self._reserve,
            )
        except BaseException:
            resources.close()
            raise
        self._needs = Needs(
            self.streaming,
            self.ledger,
            bounce_nbytes=engine.bounce_nbytes,
            others_nbytes=self._others_nbytes,
            trainable_nbytes=self._trainable_nbytes,
            activations=activations,
            in_use=self._in_use,
        )
        self.ledger.remedy = self._needs.remedy
        try:
            self._needs.check()
            first = self.streaming.first
            self.ledger.take(first, OTHERS, self._others_nbytes)
            self.ledger.take("cpu", BOUNCE, engine.bounce_nbytes)
            self.activations = ActivationStore(
                activations, device=device, engine=engine, ledger=self.ledger, store=store, reserve=self._reserve
            )
            self._saved = SavedTensors(self, self.activations)
            self.streaming.enter(self._tell("moving weights to disk"))
            for tensor in self._others:
                tensor.data = tensor.data.to(device.torch_device)
        except BaseException:
            with resources:
                self._bring_others_home()
                self.streaming.close(lambda _: None)
            raise
        self._planner = IterationPlanner(
            self.streaming, self.recorder, ledger=self.ledger, limits=limits, links=links, names=self._names
        )
        self._gradients = None
        if device.torch_device.type != "cpu":
            self._gradients = Gradients(model.parameters(), chunks, device.torch_device, self._recover_if_interrupted)
        self._plan: WrapPlan | None = None  # none was made yet
        self._explanation: list[str] = []  # at the end
        self._saw_passes = True
        self._hooks.install()
        _live.append(self)

    def _tell(self, message: str) -> Callable[[int, int], None]:
        def tell(done_nbytes: int, total_nbytes: int) -> None:
            if self._progress is not None:
                self._progress(Progress("load", done_nbytes, total_nbytes, message))

        return tell

    @property
    def is_watching(self) -> bool:
        """Whether a hook of ours runs in a forward; False when all weights are where they are computed on."""
        return self._hooks.is_installed

    # -- passes (what PassHooks tells) --------------------------------------------------------------------------------

    def begin_pass(self, *, in_backward: bool) -> None:
        has_grad = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        if not in_backward:
            if self._is_unsettled:
                self._recover()
            self._is_unsettled = True  # until the pass, and its backward, has ended
            self.activations.collect()
            self.streaming.adopt()
            self._watched = {chunk.chunk_id for chunk in self.streaming.watched()}
            if self._gradients is not None:
                self._gradients.watch()
            if has_grad:
                self._begin_training()
                self._book_gradients_at_home()
            if self._is_due:
                self._make_plan()
            self._settle_gradients()
            if has_grad and (self._is_short or not self.num_passes[TRAIN]):
                self.streaming.shrink()  # the plan knew nothing of what is saved now
            phase = TRAIN if has_grad else FORWARD
            self._pass = (phase, perf_counter())
            self.recorder.begin(phase)
            self.streaming.restart(self._stays(phase), phase)
        elif has_grad:
            self._begin_training()
        self._in_backward.append(in_backward)
        self._push_hooks(has_grad)

    def end_pass(self, *, failed: bool) -> None:
        if not self._in_backward:
            return
        self._pop_hooks()
        if self._in_backward.pop():
            return
        self._planner.note_peak()
        if self._pass is not None:
            phase, start_s = self._pass
            self._pass = None
            self._spans.append(Span(phase, "passes", start_s, perf_counter()))
            if failed:
                self.recorder.abort()
            else:
                self._end_phase(phase)
        try:
            self.streaming.restart(())
        except HeteroError:
            if failed:
                return  # the forward's own error tells; the next pass recovers
            raise
        self._is_unsettled = False
        self._settle_gradients()
        self._rest()

    def enter(self, module: nn.Module) -> Lease | None:
        chunks = self.streaming.own.get(id(module))
        if not chunks:
            return None
        self.recorder.request()
        lease = self.streaming.lease(chunks)
        self.recorder.grant(self._names[id(module)], tuple(chunk.chunk_id for chunk in chunks), self._around())
        return lease

    def _in_use(self) -> set[int]:
        """Chunks that the pass under way, or its operations and graph, look at: nobody did when it began."""
        if not self._is_unsettled:
            return set()
        return {chunk.chunk_id for chunk in self.streaming.chunks} - self._watched

    def _around(self) -> tuple[int, ...]:
        """Chunks of the modules that are under way, which stay where they are meanwhile."""
        own = self.streaming.own
        return tuple(chunk.chunk_id for module in self._hooks.entered for chunk in own.get(id(module), ()))

    def borrow(self, parameters: Sequence[nn.Parameter]) -> Callable[[], None] | None:
        """As `Streaming.borrow`, seen as a use of the chunks."""
        if all(map(self.streaming.is_shown, parameters)):
            return None
        self.recorder.request()
        borrowed = self.streaming.borrow(parameters)
        if borrowed is None:
            return None
        chunk_ids, give_back = borrowed
        self.recorder.grant("read outside its module", chunk_ids, self._around())
        return give_back

    def is_computing(self) -> bool:
        return self._hooks.is_computing and not self._is_closed

    def leave(self, lease: Lease | None) -> None:
        if lease is not None:
            self.streaming.release(lease)

    def _recover(self) -> None:
        """The last pass, or its backward, did not come to its end: torch tells nobody of a KeyboardInterrupt."""
        self._pass = self._backward = None
        self._in_backward.clear()
        while self._on_stacks:
            self._pop_hooks()
        self.recorder.abort()
        self.streaming.recover()
        self.activations.recover()

    def _recover_if_interrupted(self) -> None:
        if self._is_unsettled and torch._C._current_graph_task_id() == -1 and not self._hooks.turn.is_taken:
            self._recover()
            self._is_unsettled = False

    def _begin_training(self) -> None:
        if not self.ledger.held(self.streaming.first, GRADIENTS) and self._trainable_nbytes:
            self._reserve(self.streaming.first, GRADIENTS, self._trainable_nbytes)
        # Not those of chunks: when one moves, what is saved next may get its old memory.
        moving = {id(view.parameter) for chunk in self.streaming.chunks for view in chunk.views}
        fixed = [p for p in self.model.parameters() if id(p) not in moving]
        tensors = [*fixed, *self.streaming.away(), *self.model.buffers()]
        self._persistent = {t.untyped_storage().data_ptr() for t in tensors if t.layout is torch.strided}

    def _book_gradients_at_home(self) -> None:
        """Gradients of weights that are not where they are computed on go home after each backward."""
        more = self._unbooked_gradients_nbytes()
        if more > 0:
            self.streaming.make_host_room(more)
            self.ledger.take("cpu", GRADIENTS, more)
        elif more < 0:
            self._settle_gradients()
            self.ledger.give("cpu", GRADIENTS, -more)

    def _move_gradients(self) -> None:
        """While weights move to their places: gradients follow, as soon as there is room for all of them."""
        more = self._unbooked_gradients_nbytes()
        if self.ledger.can_take("cpu", max(more, 0)):
            self.ledger.take("cpu", GRADIENTS, max(more, 0))
            self._settle_gradients()
            self.ledger.give("cpu", GRADIENTS, max(-more, 0))

    def _unbooked_gradients_nbytes(self) -> int:
        """Bytes of gradients that go home from where the weights are now, less those that the ledger has."""
        if self._gradients is None or not self.ledger.held(self.streaming.first, GRADIENTS):
            return 0
        away = [view.parameter for chunk in self.streaming.streamed for view in chunk.views]
        return _nbytes([p for p in away if p.requires_grad]) - self.ledger.held("cpu", GRADIENTS)

    def _settle_gradients(self) -> None:
        if self._gradients is not None and torch._C._current_graph_task_id() == -1:
            self._gradients.settle()

    def _end_phase(self, phase: str) -> None:
        self.num_passes[phase] += 1
        if phase == TRAIN and self._is_short:
            self._is_short, self._is_due = False, True
        if not self.recorder.end() or (phase == TRAIN and self._trainable_nbytes):  # its backward says the rest
            return
        if self._planner.sees_new_uses(phase):
            if self.streaming.streamed:
                self._is_due = True
            else:
                self._plan = replace(self._planner.describe(None), state="planned")

    def begin_backward(self) -> None:
        me, task = threading.get_ident(), torch._C._current_graph_task_id()
        if task == -1 or self._is_closed:
            return
        under_way = self._backward if self._backward is not None and self._backward.end() is not None else None
        if under_way is not None and (under_way.thread == me or under_way.task == task):
            return  # inside one
        if self._hooks.is_computing and self._in_backward == [False]:
            return  # one that a forward itself runs

        # Torch holds it until it has called it, or the backward has raised: then nobody else tells us.
        def end() -> None:
            self._end_backward()

        alive = weakref.ref(end)
        turn_before = self._hooks.turn.take(lambda: alive() is None)
        self._is_unsettled = True
        self._backward = _Backward(me, task, alive, turn_before, perf_counter())
        self.recorder.begin(BACKWARD)
        self.streaming.restart(self._stays(BACKWARD), BACKWARD)
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _end_backward(self) -> None:
        if self._backward is None or self._is_closed:
            return
        backward, self._backward = self._backward, None
        self._spans.append(Span(BACKWARD, "passes", backward.start_s, perf_counter()))
        try:
            self.activations.collect()
            self._end_phase(BACKWARD)
            self.streaming.restart(())
            self._is_unsettled = False
            self._book_gradients_at_home()
            self._settle_gradients()
            self._rest()
        finally:
            self._hooks.turn.give(backward.turn_before)

    def _rest(self) -> None:
        """When all weights are where they are computed on, and activations may stay, see nothing any more of a phase
        that was seen whole."""
        if self._gradients is not None and any(p.device.type == "cpu" for p in self.model.parameters()):
            return  # memory of the user's own
        if self.streaming.streamed or self._is_due or self.activations.leaves_at_once or not self._hooks.is_installed:
            return
        if self.streaming.has_kept_views:
            return
        if self.num_passes[BACKWARD] or not self._trainable_nbytes:
            self._hooks.remove()
        elif self.num_passes[FORWARD]:
            self._hooks.watch()

    def _stays(self, phase: str) -> list[Stay]:
        streamed = {chunk.chunk_id for chunk in self.streaming.streamed if not chunk.is_elsewhere}
        order = self.recorder.order(phase) if self.recorder.num_passes(phase) else []
        return stays_of(order, streamed)

    def _push_hooks(self, has_grad: bool) -> None:
        ours: list[Interception | OutsideReads] = []
        self._on_stacks.append(ours)  # first: whatever call an interrupt hits, it is taken off
        if has_grad:
            ours.append(Interception(self._saved))
        if self._device.torch_device.type != "cpu":
            ours.append(OutsideReads(self.model.parameters(), self._device.torch_device, self))
        for each in ours:
            each.enter()

    def _pop_hooks(self) -> None:
        if not self._on_stacks:  # an interrupt fell before the push
            return
        for each in reversed(self._on_stacks[-1]):
            each.leave()
        self._on_stacks.pop()  # last: an interrupted `leave` is made again

    # -- what autograd asks (memory/autograd.py) ----------------------------------------------------------------------

    def is_inside_pass(self) -> bool:
        return self._hooks.is_inside and not self._is_closed

    def view(self, chunk: WeightChunk, make: Callable[[Tensor], Tensor]) -> Tensor:
        if self._is_closed:
            return make(chunk.base)
        self._hooks.turn.progress += 1
        self.recorder.request()
        tensor = self.streaming.view(chunk, make)
        self.recorder.grant(chunk.name, (chunk.chunk_id,))
        return tensor

    def find(self, tensor: Tensor) -> tuple[WeightChunk, int] | None:
        return self.streaming.find(tensor)

    def computing(self) -> Sequence[WeightChunk]:
        module = self._hooks.current
        return self.streaming.own.get(id(module), ()) if module is not None else ()

    def is_persistent(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._persistent

    # -- budgets and plan ---------------------------------------------------------------------------------------------

    def _reserve(self, tier: str, holder: str, nbytes: int) -> None:
        """Book bytes; weights make room first, then saved activations. Raises OutOfMemoryError."""
        if tier == self.streaming.first and nbytes > self.ledger.free(tier):
            if self.streaming.make_room(nbytes):
                self._is_due = True
            short = nbytes - self.ledger.free(tier)
            if short > 0:
                self.activations.make_room(short)
            if nbytes > self.ledger.free(tier) and self.streaming.collect_onlookers():
                self._is_due |= self.streaming.make_room(nbytes)
        self._is_short |= holder == ACTIVATIONS and not self.ledger.can_take(tier, nbytes)
        self.ledger.take(tier, holder, nbytes)
        if holder == ACTIVATIONS:
            self._planner.note_peak()

    def _make_plan(self) -> None:
        """Place the weights by what was recorded. Between passes."""
        self._is_due = False
        if self.streaming.streamed:
            self.streaming.collect_onlookers()
        made = self._planner.make() if self.streaming.streamed else None
        if made is None:
            return
        plan, room = made
        try:
            self.streaming.place(plan, room, self._move_gradients)
        except BaseException:
            self._is_due = True  # carried out in part
            raise
        self.num_plans += 1
        self._book_gradients_at_home()
        self._plan = self._planner.describe(plan)

    # -- figures ------------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> WrapPlan:
        """Where the weights are and what an iteration costs: in the warm-up as they are now, then as last planned."""
        if self._plan is not None:
            return self._plan
        plan = self._planner.describe(None)
        if self._trainable_nbytes and not self.ledger.held(self.streaming.first, GRADIENTS):
            plan = replace(plan, notes=[*plan.notes, self._needs.note_on_training()])
        return plan

    def stats(self) -> WrapStats:
        """What happened so far: passes, bytes per link and tier, waits."""
        executor, engine = self.streaming.stats(), self._engine.stats()
        ledger = self.ledger
        tiers = {t: TierUse(ledger.used(t), ledger.peak(t), ledger.limit(t), ledger.holders(t)) for t in ledger.tiers()}
        if self._store is not None:  # which keeps its own account
            store = self._store
            tiers["disk"] = TierUse(store.used_nbytes, store.peak_nbytes, store.nbytes, store.holders())
        return WrapStats(
            passes=dict(self.num_passes),
            tiers=tiers,
            disk_read_nbytes=engine.read_nbytes,
            disk_written_nbytes=engine.written_nbytes,
            gpu_link_nbytes=int(executor["copied_nbytes"]),
            wait_s=executor["wait_s"],
            activations_out_nbytes=self.activations.out_nbytes,
            activations_back_nbytes=self.activations.back_nbytes,
            num_unleased=self.streaming.num_unleased,
            num_plans=self.num_plans,
            sees_passes=self._saw_passes if self._is_closed else self._hooks.sees_passes,
            executor=dict(executor),
        )

    def explain(self) -> str:
        """Where each chunk is, why, and what that costs or saves per iteration, as text."""
        lines = self._explanation if self._is_closed else self._planner.explain()
        return "\n".join([str(self.plan), *(f"  {line}" for line in lines)])

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write the last passes and transfers as a Chrome trace, which opens in Perfetto. Raises ConfigError when there
        is no such folder."""
        spans = [Span(name, lane, start, end) for lane, name, start, end in self.streaming.spans]
        used = CounterSample("bytes used", perf_counter(), {t: self.ledger.used(t) for t in self.ledger.tiers()})
        write_timeline(path, [*spans, *self._spans], [used])

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give the model its memory back, with the values it has now, and release everything. Blocks. Idempotent."""
        if self._is_closed:
            return
        if torch._C._current_graph_task_id() != -1 or not self._hooks.turn.is_free(PATIENCE_S):
            raise HeteroError("the model is in the middle of a pass: close the run after it")
        # As they were before the weights come home.
        self._plan, self._explanation, self._saw_passes = self.plan, self._planner.explain(), self._hooks.sees_passes
        self._is_closed = True
        if self in _live:
            _live.remove(self)
        with self._resources:
            self._hooks.remove()
            while self._on_stacks:  # those of an interrupted pass, unless it was another thread's
                self._pop_hooks()
            try:
                self.activations.close()
            finally:
                tell = self._tell("giving the model its memory back")
                total_nbytes = sum(chunk.nbytes for chunk in self.streaming.chunks)
                try:
                    self.streaming.close(lambda done_nbytes: tell(done_nbytes, total_nbytes))
                finally:
                    self._bring_others_home()
                    if self._gradients is not None:
                        self._gradients.close()

    def _bring_others_home(self) -> None:
        for tensor in self._others:
            tensor.data = tensor.data.cpu()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def wrapped_module_of(model: nn.Module) -> str | None:
    """The name of a module of `model` that belongs to an open run, or None."""
    taken = {id(module) for run in _live for module in run.model.modules()}
    for path, module in model.named_modules():
        if id(module) in taken:
            return path or type(module).__name__
    return None


@atexit.register
def _close_live_runs() -> None:
    with ExitStack() as stack:
        for run in _live:
            if run.pid == os.getpid():  # a forked child ends here, and its parent goes on
                stack.callback(run.close)


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _settle(device: Device) -> None:
    device.record().synchronize()
