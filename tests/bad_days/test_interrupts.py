"""KeyboardInterrupt at any moment: the run goes on or says that it cannot, and closes without hanging or leaking."""

from __future__ import annotations

import gc
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero.io.backends.faulty import Fault
from hetero.memory.pipeline import InterruptedPassError, Pipeline
from hetero.report.progress import Progress
from tests.bad_days.rig import DEVICES, Disk, load, logits_of, smallest
from tests.interrupting import InterruptAt

pytestmark = pytest.mark.usefixtures("no_leaks", "no_memory_left")


@contextmanager
def interrupt_after(seconds: float) -> Iterator[None]:
    """What Ctrl-C does, that much later, unless the body has ended. The main thread gets it amid anything."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        torch.set_grad_enabled(True)  # torch.no_grad's own end can be interrupted


@pytest.mark.parametrize("device", DEVICES)
def test_an_interrupt_while_waiting_for_the_disk_leaves_a_run_that_goes_on(
    checkpoint: Path, reference: torch.Tensor, disk: Disk, device: str
) -> None:
    with load(checkpoint, device) as run:
        for _ in range(3):
            disk.fault = lambda block: Fault(delay_s=0.5)
            with pytest.raises(KeyboardInterrupt), interrupt_after(0.1):
                for _ in range(5):
                    logits_of(run.model)
            disk.fault = None
            assert torch.equal(logits_of(run.model), reference)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("where", ["model.layers.1.self_attn.q_proj", "model.layers.2", "lm_head"])
def test_an_interrupt_while_computing_leaves_a_run_that_goes_on(
    checkpoint: Path, reference: torch.Tensor, device: str, where: str
) -> None:
    # torch calls no hook for a KeyboardInterrupt, so the leases of the pass stay open until the next one.
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with load(checkpoint, device) as run:
        module = run.model.get_submodule(where)
        for _ in range(20):
            handle = module.register_forward_pre_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                logits_of(run.model)
            handle.remove()
            assert torch.equal(logits_of(run.model), reference)


@pytest.mark.parametrize("device", DEVICES)
def test_a_run_closes_after_an_interrupted_pass(checkpoint: Path, device: str) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    run = load(checkpoint, device)
    run.model.model.layers[1].mlp.down_proj.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        logits_of(run.model)
    run.close()


NUM_MOMENTS = 150
BOOKKEEPING = {
    "cpu": ["_start_read", "_count_read", "_advance", "_pump", "_drain", "_retire", "_upcoming"],
    "emulated": ["_start_staging", "_start_copy", "_advance", "_pump", "_drain", "_retire", "_upcoming"],
}


@pytest.mark.parametrize(("device", "method"), [(device, name) for device in DEVICES for name in BOOKKEEPING[device]])
def test_an_interrupt_inside_the_bookkeeping_is_admitted_and_closes(
    checkpoint: Path, device: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original: Callable[..., Any] = getattr(Pipeline, method)
    main = threading.main_thread()

    def interrupted(self: Pipeline, *args: Any) -> Any:
        result = original(self, *args)
        if threading.current_thread() is main:
            monkeypatch.undo()
            raise KeyboardInterrupt
        return result

    run = load(checkpoint, device)
    monkeypatch.setattr(Pipeline, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        for _ in range(50):  # mostly the threads of engine and device do the bookkeeping
            logits_of(run.model)
    with pytest.raises(InterruptedPassError, match=r"interrupted \(KeyboardInterrupt\).*load the model again"):
        logits_of(run.model)
    run.close()


# Python prints and forgets an interrupt that lands in a finalizer or in a callback of the garbage collector (test tools
# install some); the run must be right all the same, and that is what is asserted.
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("device", DEVICES)
def test_interrupts_at_random_moments_never_hang_and_never_lie(
    checkpoint: Path, reference: torch.Tensor, device: str
) -> None:
    run = load(checkpoint, device)
    try:
        for number in range(60):
            try:
                with interrupt_after(0.0002 + 0.00023 * number):
                    assert torch.equal(logits_of(run.model), reference)
            except KeyboardInterrupt:
                pass
            try:
                assert torch.equal(logits_of(run.model), reference)
            except InterruptedPassError:
                run.close()
                run = load(checkpoint, device)
                gc.collect()  # not in the next round, where a finalizer would swallow the interrupt
    finally:
        run.close()


@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("device", DEVICES)
def test_an_interrupt_at_any_call_of_a_pass_is_survived_or_admitted(
    checkpoint: Path, reference: torch.Tensor, device: str
) -> None:
    run = load(checkpoint, device)
    logits_of(run.model)
    with InterruptAt(0) as counted:
        logits_of(run.model)
    moments = random.Random(device).sample(range(1, counted.num_seen), NUM_MOMENTS)
    for i, number in enumerate(moments):
        try:
            with InterruptAt(number):
                logits_of(run.model)
        except KeyboardInterrupt:
            if i % 4 == 0:  # as `with hetero.load(...)` does, all frames of the pass still alive
                run.close()
                run = load(checkpoint, device)
        try:
            assert torch.equal(logits_of(run.model), reference)
        except InterruptedPassError:
            run.close()
            run = load(checkpoint, device)
    run.close()


@pytest.mark.parametrize("device", DEVICES)
def test_an_interrupted_load_gives_up_what_is_queued(checkpoint: Path, disk: Disk, device: str) -> None:
    smallest(checkpoint, device)
    blocks: list[Any] = []

    def slow(block: Any) -> Fault:
        blocks.append(block)
        return Fault(delay_s=0.2)

    def start(progress: Any) -> None:
        disk.fault = slow

    start_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt), interrupt_after_load_began(disk):
        load(checkpoint, device, extra_nbytes=300_000, progress=start)
    assert time.monotonic() - start_s < 60
    assert blocks, "the interrupt came before anything was read"


@contextmanager
def interrupt_after_load_began(disk: Disk) -> Iterator[None]:
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            if disk.fault is not None:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                return

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_an_interrupt_from_the_progress_callback_ends_the_load(checkpoint: Path) -> None:
    def interrupt(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(checkpoint, extra_nbytes=300_000, progress=interrupt)
