"""One system's greedy decode in a process of its own; `beyond_ram.py` starts it with an interpreter that has it.

Prints one JSON object on stdout as its last line. Depends on nothing of this project but, for "hetero", hetero itself.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "llama-cpp-python", "numpy")
CONTEXT = 64


def prompt_ids(num_tokens: int) -> list[int]:
    numbers = random.Random(0)
    return [numbers.randint(10, 1000) for _ in range(num_tokens)]


class Steps:
    """Seconds and device bytes of each step: a step ends with `mark`. The first one reads the prompt."""

    def __init__(self, model: Path) -> None:
        self.times_s: list[float] = []
        self.process_nbytes: list[int] = []
        self.disk_nbytes: list[int] = []
        status = os.stat(model)
        self._device = [str(os.major(status.st_dev)), str(os.minor(status.st_dev))]
        self.start()

    def start(self) -> None:
        self._last = self._now()

    def mark(self) -> None:
        now = self._now()
        self.times_s.append(now[0] - self._last[0])
        self.process_nbytes.append(now[1] - self._last[1])
        self.disk_nbytes.append(now[2] - self._last[2])
        self._last = now

    def _now(self) -> tuple[float, int, int]:
        return time.perf_counter(), self._process(), self._disk()

    def _process(self) -> int:
        """What this process made the device read, page faults and readahead included (/proc/self/io)."""
        found = re.search(r"^read_bytes: (\d+)$", Path("/proc/self/io").read_text(), re.MULTILINE)
        return int(found[1]) if found else 0

    def _disk(self) -> int:
        """What the whole device read, whoever asked (/proc/diskstats)."""
        for line in Path("/proc/diskstats").read_text().splitlines():
            fields = line.split()
            if fields[:2] == self._device:
                return int(fields[5]) * 512
        return 0


def run_hetero(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    import hetero
    from hetero.inference.generate import stream_tokens

    torch.set_num_threads(options.threads)
    start = time.perf_counter()
    with hetero.load(options.model, device="cpu", cpu_memory=options.cpu_memory, context=CONTEXT) as run:
        load_s = time.perf_counter() - start
        steps, tokens = Steps(options.model), []
        with torch.inference_mode():
            for token, _ in stream_tokens(
                run, prompt_ids(options.prompt), max_tokens=options.tokens, temperature=0.0, seed=0
            ):
                steps.mark()
                tokens.append(token)
        stats = run.stats()
        tier = stats.tiers["cpu"]
        decode = [traffic for traffic in run.traffic.passes if traffic.phase == "decode"]  # none: all is resident
        extra = {
            "streamed_nbytes": sorted(traffic.disk_nbytes for traffic in decode)[len(decode) // 2] if decode else 0,
            "wait_s": [round(traffic.wait_s, 4) for traffic in decode],
            "predicted_s": run.decision.plan.prediction.time_s,
            "predicted_bottleneck": stats.bottleneck,
            "budget_nbytes": tier.limit_nbytes,
            "ledger_peak_nbytes": tier.peak_nbytes,
            "holders_nbytes": tier.holders,
            "chunk_nbytes": run.plan.to_dict()["chunk_nbytes"],
            "ring_nbytes": run.decision.plan.cpu_ring_nbytes,
            "huge_page_nbytes": sum(getattr(arena, "huge_nbytes", 0) for arena in run.arenas.values()),
            "io": stats.io,
            "executor": stats.executor,
        }
    return _result(load_s, steps, tokens, extra)


def run_mmap(options: argparse.Namespace) -> dict[str, Any]:
    return _transformers(options, {})


def run_accelerate(options: argparse.Namespace) -> dict[str, Any]:
    """device_map "auto" with a bounded CPU share, the rest read from the original files at each use."""
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        memory = {"cpu": options.peer_cpu_nbytes}
        return _transformers(options, {"device_map": "auto", "max_memory": memory, "offload_folder": folder})


def _transformers(options: argparse.Namespace, how: dict[str, Any]) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    torch.set_num_threads(options.threads)
    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16, low_cpu_mem_usage=True, **how)
    load_s = time.perf_counter() - start
    places = getattr(model, "hf_device_map", {})
    extra = {"modules_on_disk": sum(place == "disk" for place in places.values()), "num_modules": len(places)}
    cache = DynamicCache(config=model.config)
    steps, tokens = Steps(options.model), []
    ids = torch.tensor([prompt_ids(options.prompt)])
    with torch.inference_mode():
        for _ in range(options.tokens):
            out = model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)
            ids = out.logits[:, -1:].argmax(-1)
            tokens.append(int(ids))
            steps.mark()
    return _result(load_s, steps, tokens, extra)


def run_llamacpp(options: argparse.Namespace) -> dict[str, Any]:
    import numpy as np

    llama_cpp = importlib.import_module("llama_cpp")  # lives in the peers' interpreter only

    start = time.perf_counter()
    llama = llama_cpp.Llama(
        str(options.model),
        n_ctx=CONTEXT,
        n_batch=CONTEXT,
        n_threads=options.threads,
        n_threads_batch=options.threads,
        use_mmap=True,
        verbose=False,
    )
    load_s = time.perf_counter() - start
    steps, tokens = Steps(options.model), []
    ids = prompt_ids(options.prompt)
    for _ in range(options.tokens):
        llama.eval(ids)
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llama.ctx, -1), (llama.n_vocab(),))
        ids = [int(logits.argmax())]
        tokens.append(ids[0])
        steps.mark()
    return _result(load_s, steps, tokens, {})


def _result(load_s: float, steps: Steps, tokens: list[int], extra: dict[str, Any]) -> dict[str, Any]:
    peak = re.search(r"^VmHWM:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return {
        "load_s": load_s,
        "step_s": steps.times_s,
        "step_process_nbytes": steps.process_nbytes,
        "step_disk_nbytes": steps.disk_nbytes,
        "tokens": tokens,
        "peak_rss_nbytes": int(peak[1]) << 10 if peak else 0,
        "extra": extra,
    }


# -- the disk ---------------------------------------------------------------------------------------------------------

WINDOW_NBYTES = 128 << 20
BLOCK_NBYTES = 4 << 20


def run_bandwidth(options: argparse.Namespace) -> dict[str, Any]:
    """Bytes per second of direct reads of the model's files into huge pages: by hetero's engine, and by fio."""
    files = sorted(options.model.glob("*.safetensors"))
    return {"engine_bytes_per_s": _engine_rate(files), "fio_bytes_per_s": _fio_rate(files)}


def _engine_rate(files: list[Path]) -> float:
    from hetero.io.arena import Arena
    from hetero.io.engine import Engine, Request

    arena = Arena(WINDOW_NBYTES, name="bandwidth")
    rates = []
    with Engine() as engine:
        for _ in range(2):
            blocks = [
                (file, offset)
                for file in map(engine.open, files)
                for offset in range(0, file.nbytes // BLOCK_NBYTES * BLOCK_NBYTES, BLOCK_NBYTES)
            ]
            start = time.perf_counter()
            for first in range(0, len(blocks), WINDOW_NBYTES // BLOCK_NBYTES):
                _read_window(engine, Request, arena.address, blocks[first : first + WINDOW_NBYTES // BLOCK_NBYTES])
            rates.append(len(blocks) * BLOCK_NBYTES / (time.perf_counter() - start))
    arena.close()
    return max(rates)


def _read_window(engine: Any, request: Callable[..., Any], address: int, blocks: list[tuple[Any, int]]) -> None:
    requests = [
        request(file, offset, BLOCK_NBYTES, address + number * BLOCK_NBYTES)
        for number, (file, offset) in enumerate(blocks)
    ]
    for future in engine.submit(requests):
        future.result()


def _fio_rate(files: list[Path]) -> float | None:
    """None where fio is missing or the kernel has no huge pages to reserve. Leaves the reservation as it was."""
    pages = Path("/proc/sys/vm/nr_hugepages")
    command = [
        "fio", "--name=read", f"--filename={':'.join(map(str, files))}", "--readonly", "--rw=read", "--direct=1",
        "--bs=4M", "--ioengine=io_uring", "--iodepth=8", "--iomem=mmaphuge", "--hugepage-size=2m", "--runtime=2",
        "--time_based", "--output-format=json",
    ]  # fmt: skip
    try:
        before = pages.read_text()
        pages.write_text(str(int(before) + 32))
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        finally:
            pages.write_text(before)
        return float(json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]["bw_bytes"])
    except (OSError, ValueError, KeyError, subprocess.CalledProcessError):
        return None


SYSTEMS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "hetero": run_hetero,
    "accelerate": run_accelerate,
    "mmap": run_mmap,
    "llama.cpp": run_llamacpp,
    "bandwidth": run_bandwidth,
}


def _versions() -> Iterator[tuple[str, str]]:
    yield "python", platform.python_version()
    for package in PACKAGES:
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--cpu-memory", default="auto", help="hetero's budget")
    parser.add_argument("--peer-cpu-nbytes", type=int, default=0, help="accelerate's CPU share")
    parser.add_argument("--scratch", type=Path, help="where accelerate may write")
    options = parser.parse_args()
    result = SYSTEMS[options.system](options)
    result["versions"] = dict(_versions())
    sys.stdout.write("\n" + json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
