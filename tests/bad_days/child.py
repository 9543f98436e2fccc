"""A process of its own for what one process cannot show: death, Ctrl-C, exit. Called with MODE FOLDER NBYTES.

Prints `ready` on its own line when it is where the test wants it.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import sys
import time
import warnings
from typing import Any

import torch

import hetero
import hetero.run
import hetero.setup
import hetero.tiers
from hetero.io.backends.faulty import Fault, FaultyBackend
from hetero.io.engine import Engine
from hetero.io.errors import IOEngineError

torch.set_num_threads(1)
IDS = torch.arange(5, 18)[None]
mode, folder, nbytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
fault: Fault | None = None
kept: list[Any] = []  # what is still in use when the process ends


def make_engine(timeout_s: float = 60.0) -> Engine:
    return Engine(wrap_backend=lambda inner: FaultyBackend(inner, lambda block: fault), timeout_s=timeout_s)


def load(**options: Any) -> hetero.Run:
    return hetero.load(folder, device="cpu", cpu_memory=nbytes, context=64, chunk_nbytes=48 << 10, **options)


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def slow_from_the_load_on() -> None:
    original = hetero.tiers.Tiers.make_executor

    def make_executor(self: Any) -> Any:
        global fault
        fault = Fault(delay_s=0.5)
        say("ready")
        return original(self)

    vars(hetero.tiers)["Tiers"].make_executor = make_executor


def slow_from_the_prompt_on() -> None:
    original = hetero.run.Run.report_prefill

    def report_prefill(self: Any, num_done: int, num_pieces: int) -> None:
        global fault
        fault = Fault(delay_s=0.5)
        say("ready")
        original(self, num_done, num_pieces)

    vars(hetero.run)["Run"].report_prefill = report_prefill


def command() -> None:
    from hetero.cli import main

    sys.argv = ["hetero", "generate", folder, "-p", "w5 w6 w7", "--device", "cpu", "--cpu-memory", str(nbytes)]
    sys.argv += ["-c", "64", "-n", "40"]
    main()


def answer() -> None:
    with load() as run, torch.no_grad():
        say("ready")
        for _ in range(20):
            logits = run.model(input_ids=IDS).logits
        say(hashlib.sha256(logits.numpy().tobytes()).hexdigest())


def dropped() -> None:
    """Runs that nobody closes: one dropped, one in a cycle, one still in use at exit, one all resident."""
    warnings.simplefilter("error")
    gc.disable()
    torch.set_grad_enabled(False)
    load().model(input_ids=IDS)
    cycle: list[Any] = [load()]
    cycle.append(cycle)
    del cycle
    kept[:] = [load(), hetero.load(folder, device="cpu", cpu_memory="64MiB", context=64)]
    kept.append(hetero.load(folder, device="emulated", gpu_memory="2MiB", cpu_memory=nbytes, context=64))
    kept.extend([run.model(input_ids=IDS).logits for run in kept])
    kept.append(kept[0].stream("w5 w6 w7"))
    next(kept[-1])
    say("ready")


def stuck() -> None:
    """A disk that never answers again, neither the run nor the exit."""
    global fault
    vars(hetero.setup)["Engine"] = functools.partial(make_engine, 0.5)
    run = load()
    fault = Fault(stuck=True)
    try:
        for _ in range(4):
            run.model(input_ids=IDS)
    except IOEngineError as error:
        say(str(error))


if __name__ == "__main__":
    vars(hetero.setup)["Engine"] = make_engine
    if mode.endswith("load"):
        slow_from_the_load_on()
    if mode.endswith("generate"):
        slow_from_the_prompt_on()
    if mode.startswith("command"):
        command()
    elif mode in ("load", "generate"):
        with load() as run:
            run.generate("w5 w6 w7", max_tokens=40)
        time.sleep(60)
    else:
        {"answer": answer, "dropped": dropped, "stuck": stuck}[mode]()
