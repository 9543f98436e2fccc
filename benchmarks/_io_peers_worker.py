"""The other end of `_io_peers.Peer`: one JSON request a line on stdin, one JSON answer a line on stdout.

Imports the standard library and the peer that is asked for, so its interpreter needs neither hetero nor numpy. A peer
that is missing, or does not work here, is an answer with the reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

Answer = dict[str, Any]

_SAMPLE_NBYTES = 4096  # every tensor is read at this step, so that every page of it must be there

# ---- DeepSpeed's aio ----

_aio: dict[str, Any] = {}


def aio_open(*, block_nbytes: int, queue_depth: int, num_threads: int, nbytes: int) -> Answer:
    """Make a handle with one setting; its page-locked tensor of the whole file is made once."""
    torch = import_module("torch")
    if "op" not in _aio:
        _aio["op"] = import_module("deepspeed.ops.op_builder").AsyncIOBuilder().load(verbose=False)
    _aio["handle"] = _aio["op"].aio_handle(block_nbytes, queue_depth, False, True, num_threads)
    buffer = _aio.get("buffer")
    if buffer is None or buffer.numel() != nbytes:
        _aio["owner"] = _aio["op"].aio_handle(block_nbytes, queue_depth, False, True, 1)  # it may free the tensor
        buffer = _aio["owner"].new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8))
        buffer.random_()
        _aio["buffer"] = buffer
    return {}


def aio_run(*, path: str, write: bool) -> Answer:
    """Read or write the whole file once, from or to the page-locked tensor."""
    move = _aio["handle"].sync_pwrite if write else _aio["handle"].sync_pread
    start_s, cpu_s = time.perf_counter(), _cpu_s()
    move(_aio["buffer"], path, 0)
    return {"s": time.perf_counter() - start_s, "cpu_s": _cpu_s() - cpu_s}


# ---- checkpoints to CPU tensors ----


@contextlib.contextmanager
def load_hetero(path: str) -> Iterator[dict[str, Any]]:
    import torch

    from hetero.cpu_kernels.formats import format_for
    from hetero.io.checkpoint import read_index
    from hetero.io.engine import Engine
    from hetero.io.load import load_arrays

    index = read_index(path)
    with Engine() as engine:
        arrays = load_arrays(engine, index)
    tensors = {}
    for name, array in arrays.items():
        dtype = format_for(index.tensors[name].format).torch_dtype
        if dtype is None:
            raise ValueError(f"{name} is packed; the rivals load plain safetensors only")
        tensors[name] = torch.from_numpy(array).view(dtype).view(index.tensors[name].shape)
    yield tensors


@contextlib.contextmanager
def load_safetensors(path: str) -> Iterator[dict[str, Any]]:
    load_file = import_module("safetensors.torch").load_file
    tensors: dict[str, Any] = {}
    for file in _shards(path):
        tensors |= load_file(file)
    yield tensors


@contextlib.contextmanager
def load_fastsafetensors(path: str) -> Iterator[dict[str, Any]]:
    library, torch = import_module("fastsafetensors"), import_module("torch")
    loader = library.SafeTensorsFileLoader(library.SingleGroup(), torch.device("cpu"), nogds=True)
    loader.add_filenames({0: _shards(path)})
    buffers = loader.copy_files_to_device()
    try:
        yield {name: buffers.get_tensor(name) for name in buffers.key_to_rank_lidx}
    finally:
        buffers.close()
        loader.close()


@contextlib.contextmanager
def load_runai(path: str) -> Iterator[dict[str, Any]]:
    with import_module("runai_model_streamer").SafetensorsStreamer() as streamer:
        streamer.stream_files(_shards(path))
        yield dict(streamer.get_tensors())


LOADERS: dict[str, Callable[[str], contextlib.AbstractContextManager[dict[str, Any]]]] = {
    "hetero": load_hetero,
    "safetensors": load_safetensors,
    "fastsafetensors": load_fastsafetensors,
    "runai-model-streamer": load_runai,
}


def prepare(*, loader: str) -> Answer:
    """Import what the loader needs, so that no import is in a measurement, and name its version."""
    import_module("torch")
    module = import_module({"runai-model-streamer": "runai_model_streamer"}.get(loader, loader))
    return {"version": getattr(module, "__version__", None) or metadata.version(loader)}


def load(*, loader: str, path: str) -> Answer:
    """Load every tensor, all alive at once, and read a number from each of their pages."""
    _reset_peak()
    before_nbytes = _status_nbytes("VmRSS")
    start_s, cpu_s = time.perf_counter(), _cpu_s()
    with LOADERS[loader](path) as tensors:
        loaded_s = time.perf_counter() - start_s
        checksum = sum(_sample(tensor) for tensor in tensors.values())
        answer = {"s": time.perf_counter() - start_s, "loaded_s": loaded_s, "cpu_s": _cpu_s() - cpu_s}
        answer |= {"checksum": checksum, "num_tensors": len(tensors)}
        answer |= {"before_nbytes": before_nbytes, "peak_nbytes": _status_nbytes("VmHWM")}
        del tensors
    gc.collect()
    return answer


def _sample(tensor: Any) -> int:
    import torch

    flat = tensor.detach().view(-1).view(torch.uint8) if tensor.numel() else tensor.view(torch.uint8)
    return int(flat[::_SAMPLE_NBYTES].sum()) + int(flat[-1:].sum())


def _shards(path: str) -> list[str]:
    where = Path(path)
    return [path] if where.is_file() else [os.fspath(file) for file in sorted(where.glob("*.safetensors"))]


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _status_nbytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _reset_peak() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def package_version(*, package: str) -> Answer:
    return {"version": metadata.version(package)}


_COMMANDS: dict[str, Callable[..., Answer]] = {
    "aio_open": aio_open,
    "aio_run": aio_run,
    "prepare": prepare,
    "load": load,
    "version": package_version,
}


def _serve() -> None:
    # libraries print to stdout; answers go to a copy of it that they do not know
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = _COMMANDS[request.pop("what")](**request)
        except (ImportError, metadata.PackageNotFoundError) as error:
            answer = {"unavailable": f"not installed ({error})"}
        except Exception as error:
            answer = {"unavailable": f"does not work here: {type(error).__name__}: {str(error)[:300]}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
