"""hetero.wrap: any module, in place, inside its budgets."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

from hetero.io.arena import Arena
from hetero.io.engine import Engine, Request
from hetero.io.errors import ConfigError, UnsupportedError
from hetero.io.operation import finish
from hetero.io.scratch import ScratchStore
from hetero.measure import trim_heap
from hetero.memory.activations import Policy
from hetero.memory.budget import MemoryLimits, detect_cpu, parse_size, process_baseline
from hetero.memory.device import Device
from hetero.memory.weights import find_chunks
from hetero.native import report_missing_once
from hetero.report.progress import ProgressCallback
from hetero.setup import limits_of, links_of, open_limited
from hetero.wrapped import WrappedRun, wrapped_module_of

SMALL_NBYTES = (4096, 1 << 20)
"""What never moves: a 16384th of the model, within these bounds."""
PROBE_NBYTES = 32 << 20
ACTIVATION_POLICIES = ("keep", "cpu", "disk", "auto")


def wrap(
    model: nn.Module,
    *,
    gpu_memory: int | str = "auto",
    cpu_memory: int | str = "auto",
    disk: str | os.PathLike[str] | None = None,
    disk_memory: int | str = "auto",
    device: str = "auto",
    activations: Policy = "auto",
    link: int | str | None = None,
    progress: ProgressCallback | None = None,
) -> WrappedRun:
    """Run and train `model`, in place, inside memory budgets: `run.model is model`, its parameters and names stay.

    gpu_memory, cpu_memory: hard limits on weights, gradients, saved activations and buffers, like "6GiB", "80%", "auto"
    or bytes. device: "auto", "cpu", "cuda", "xpu", or "emulated": a GPU tier made of RAM, with `link` as its speed.
    disk: a folder on a local disk for what fits nowhere else; without it there is no disk tier. disk_memory: its limit.
    activations: what autograd saves for backward stays ("keep"), leaves at once ("cpu", "disk"), or leaves when room is
    short ("auto").

    Close the run, or use it as a context manager: the model gets its memory back, with the values it has then. Blocks
    while weights that do not fit are written to `disk`. Raises ConfigError and UnsupportedError before anything has
    changed, with what each tier needs and has.
    """
    _check(model, activations)
    _check_options(device, disk, disk_memory, activations, progress)
    report_missing_once()
    with ExitStack() as stack:
        opened = open_limited(device, gpu_memory, link)
        stack.callback(opened.close)
        parameters = list(model.named_parameters())
        total_nbytes = sum(p.numel() * p.element_size() for _, p in parameters)
        small_nbytes = min(max(total_nbytes // 16384, SMALL_NBYTES[0]), SMALL_NBYTES[1])
        chunks = find_chunks(parameters, torch.device("cpu"), small_nbytes=small_nbytes, buffers=model.buffers())
        model_nbytes = sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()])
        limits = _limits(opened, gpu_memory, cpu_memory, model_nbytes)
        engine = stack.enter_context(Engine())
        store = None
        if disk is not None:
            need = sum(chunk.slot_nbytes for chunk in chunks)
            store = stack.enter_context(_open_store(disk, disk_memory, need, limits, engine, activations))
        disk_rate = _measure_store(engine, store, limits) if store is not None else float(1 << 30)
        links = links_of(opened, disk_rate, limits, room_nbytes=limits.cpu.nbytes)
        run = WrappedRun(
            model,
            chunks,
            device=opened,
            engine=engine,
            store=store,
            limits=limits,
            links=links,
            activations=activations,
            progress=progress,
            resources=stack.pop_all(),
        )
    return run


def _check(model: Any, activations: str) -> None:
    """Refuse what cannot be wrapped, by name, before anything is changed."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"hetero.wrap takes a torch.nn.Module, got {type(model).__name__}; for a checkpoint on disk use hetero.load"
        )
    if activations not in ACTIVATION_POLICIES:
        raise ConfigError(f'activations={activations!r} is not known; choose "keep", "cpu", "disk" or "auto"')
    name = wrapped_module_of(model)
    if name is not None:
        raise ConfigError(f"{name} is wrapped already: close that run first")
    for path, module in model.named_modules():
        where = path or type(model).__name__
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"{where} is a scripted module, whose forward runs outside Python: wrap the module before torch.jit"
            )
        if type(module).__name__ in ("FullyShardedDataParallel", "DistributedDataParallel", "DataParallel"):
            raise UnsupportedError(f"{where} is a {type(module).__name__}: wrap the module inside it")
    for path, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
            raise UnsupportedError(f"{path} is not initialised yet: run one batch through the lazy module, then wrap")
        if type(tensor.data).__name__ == "DTensor":
            raise UnsupportedError(
                f"{path} is a DTensor, sharded by torch.distributed: hetero moves plain tensors only"
            )
        if tensor.device.type not in ("cpu", "meta"):
            raise ConfigError(
                f"{path} is on {tensor.device}: move the model to the CPU first; hetero brings weights from there"
            )
        if tensor.is_meta:
            raise ConfigError(
                f"{path} is on meta and has no bytes: load weights first, or use hetero.load on the checkpoint"
            )


def _check_options(device: Any, disk: Any, disk_memory: Any, activations: str, progress: Any) -> None:
    """Refuse values of a wrong kind, and those that only mean something beside another option."""
    if not isinstance(device, str):
        raise ConfigError(
            f"device={device!r} is a {type(device).__name__}, not a name; "
            'choose "auto", "cpu", "cuda", "cuda:1", "xpu" or "emulated"'
        )
    if disk is not None and not isinstance(disk, (str, os.PathLike)):
        raise ConfigError(f"disk={disk!r} is a {type(disk).__name__}, not a folder's path")
    if disk is None and disk_memory != "auto":
        raise ConfigError(f'disk_memory={disk_memory!r} limits a disk tier: set disk="FOLDER" as well')
    if disk is None and activations == "disk":
        raise ConfigError(f'activations={activations!r} needs a disk tier: set disk="FOLDER" as well')
    if progress is not None and not callable(progress):
        raise ConfigError(f"progress={progress!r} is a {type(progress).__name__}, not a function of one Progress")


def _limits(device: Device, gpu_memory: int | str, cpu_memory: int | str, model_nbytes: int) -> MemoryLimits:
    """The model is in RAM already and counts in the budgets: it is no part of what others hold."""
    trim_heap()
    found, baseline = detect_cpu(), process_baseline()
    cpu = replace(found, available_nbytes=found.available_nbytes + model_nbytes)
    rest = replace(baseline, anonymous_nbytes=max(0, baseline.anonymous_nbytes - model_nbytes))
    return limits_of(device, gpu_memory, cpu_memory, cpu=cpu, baseline=rest)


def _open_store(
    disk: str | os.PathLike[str],
    disk_memory: int | str,
    weights_nbytes: int,
    limits: MemoryLimits,
    engine: Engine,
    activations: str,
) -> ScratchStore:
    folder = Path(disk)
    if not os.fspath(disk) or not folder.is_dir():  # an empty path would be the current folder
        raise ConfigError(f"disk={os.fspath(disk)!r} is not a folder: create it first")
    if disk_memory == "auto":
        # Activations that leave the tiers above: at most a few times what those hold.
        first = limits.gpu.nbytes if limits.gpu is not None else limits.cpu.nbytes
        extra = 0 if activations == "keep" else min(4 * first, 8 << 30)
        status = os.statvfs(folder)
        free = status.f_bavail * status.f_frsize
        nbytes = weights_nbytes + max(0, min(extra, (free - weights_nbytes) // 2))
    else:
        nbytes = parse_size(disk_memory, name="disk_memory")
        if nbytes < weights_nbytes:
            raise ConfigError(
                f"disk_memory={disk_memory!r} is {nbytes} bytes, but the weights alone may need {weights_nbytes}"
            )
    return ScratchStore(folder, max(nbytes, 4096), engine=engine)


def _measure_store(engine: Engine, store: ScratchStore, limits: MemoryLimits) -> float:
    """Bytes per second of reading what was just written to the scratch file. Blocks for 0.1 s or so."""
    nbytes = min(PROBE_NBYTES, store.nbytes, limits.cpu.nbytes // 4) // 4096 * 4096
    if nbytes == 0 or store.file is None:
        return float(1 << 30)
    probe = Arena(nbytes, name="disk probe")
    try:
        finish(engine.submit([Request(store.file, 0, nbytes, probe.address, write=True)]))
        start = perf_counter()
        finish(engine.submit([Request(store.file, 0, nbytes, probe.address)]))
        return nbytes / (perf_counter() - start)
    finally:
        probe.close()


__all__ = ["wrap"]
