"""The I/O engine beside fio and DeepSpeed's aio, on one file, in one run.

    python benchmarks/io.py --workdir DIR [--peers-python PYTHON]

Every contender passes over the whole file once a round, reading or overwriting it with O_DIRECT, all with the same
block size and queue depth, into buffers on huge pages and into buffers on ordinary ones. DeepSpeed brings its own
buffer and is also measured at other settings. Figures are medians over the rounds, ratios medians of the rounds' own
ratios, because the rate of a shared disk drifts more than the contenders differ.
"""

from __future__ import annotations

import argparse
import queue
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from _fio import FIO_ENGINES, FioJob, fio_version, reserved_huge_pages, run_fio, why_no_fio
from _io_peers import AIO_SETTINGS, Peer
from _io_report import IOContender, Setting, write_io_report
from _rounds import Sample, UnavailableError, own_cpu_s, run_rounds

from hetero.io.arena import Arena
from hetero.io.backends.probe import BackendName
from hetero.io.engine import Engine, Request
from hetero.io.errors import UnsupportedError

WORKDIR = Path(__file__).resolve().parents[1] / "build" / "bench"
NUM_THREADS = 2
"""Blocking threads of fio's psync, as many as the engine's threads backend has."""
NUM_BUFFERS_PER_THREAD = 2
"""hetero's for its threads backend: one being moved, one for the next block. io_uring has one per block in flight, as
fio has. More would be unfair to hetero: what was just used is still in a cache, which a virtual disk copies through."""
BACKENDS: tuple[BackendName, ...] = ("io_uring", "threads")


# ---- the file ----


def make_file(setting: Setting) -> list[int]:
    """Write random bytes, so that no layer below can save work, and return a checksum per block."""
    rng = np.random.Generator(np.random.SFC64(20260101))
    sums = []
    with setting.path.open("wb") as file:
        for _ in range(setting.file_nbytes // setting.block_nbytes):
            block = rng.bytes(setting.block_nbytes)
            sums.append(_checksum(np.frombuffer(block, np.uint8)))
            file.write(block)
    return sums


def _checksum(block: npt.NDArray[np.uint8]) -> int:
    return int(block.view(np.uint64).sum(dtype=np.uint64))


# ---- hetero ----


def hetero_pass(
    setting: Setting,
    backend: BackendName,
    arena: Arena,
    *,
    write: bool,
    see: Callable[[int, npt.NDArray[np.uint8]], None] | None = None,
) -> Sample:
    """Move every block once, one request each, through the buffers in `arena`, each used again once it is free.

    `see(block, bytes)` is shown every buffer before it is used again.
    """
    size = setting.block_nbytes
    num_blocks = setting.file_nbytes // size
    num_slots = NUM_BUFFERS_PER_THREAD * NUM_THREADS if backend == "threads" else setting.queue_depth
    num_parts = NUM_THREADS if backend == "threads" else 1  # read in turn, as psync's threads do: a disk may care
    order = [
        start + i for i in range(num_blocks // num_parts) for start in range(0, num_blocks, num_blocks // num_parts)
    ]
    done: queue.SimpleQueue[tuple[int, int, Future[int]]] = queue.SimpleQueue()
    with Engine(backend=backend, block_nbytes=size, queue_depth=setting.queue_depth) as engine:
        file = engine.open(setting.path, writable=write)
        start_s, start_cpu_s = time.perf_counter(), own_cpu_s()
        for number in range(num_blocks + num_slots):
            slot = number
            if number >= num_slots:
                old_block, slot, future = done.get()
                if future.result() != size:
                    raise AssertionError(f"block {old_block}: {future.result()} bytes of {size}")
                if see:
                    see(old_block, arena.array[slot * size : (slot + 1) * size])
            if number < num_blocks:
                block = order[number]
                request = Request(file, block * size, size, arena.address + slot * size, write)
                (future,) = engine.submit([request])
                future.add_done_callback(partial(_tell, done, block, slot))
        sample = Sample(time.perf_counter() - start_s, own_cpu_s() - start_cpu_s, num_blocks * size)
        file.close()
    return sample


def _tell(done: queue.SimpleQueue[tuple[int, int, Future[int]]], block: int, slot: int, future: Future[int]) -> None:
    done.put((block, slot, future))


def check_reads(setting: Setting, backend: BackendName, arena: Arena, sums: list[int]) -> None:
    """Read the file once and end the benchmark if a block is not what was written."""

    def see(block: int, data: npt.NDArray[np.uint8]) -> None:
        if _checksum(data) != sums[block]:
            sys.exit(f"hetero {backend}: block {block} was not read as it was written")

    hetero_pass(setting, backend, arena, write=False, see=see)


# ---- contenders ----


def make_arenas(setting: Setting, stack: ExitStack) -> list[Arena]:
    """Buffers on huge pages and on ordinary ones, with random bytes to write."""
    nbytes = max(setting.queue_depth, NUM_BUFFERS_PER_THREAD * NUM_THREADS) * setting.block_nbytes
    arenas = [Arena(nbytes, name="buffers", huge_pages=huge) for huge in (True, False)]
    for arena in arenas:
        stack.callback(arena.close)
        arena.array[:] = np.frombuffer(np.random.default_rng(7).bytes(arena.nbytes), np.uint8)
    return arenas


def hetero_contenders(setting: Setting, sums: list[int], arenas: list[Arena]) -> list[IOContender]:
    contenders = []
    for backend in BACKENDS:
        for arena, huge in zip(arenas, (True, False), strict=True):
            try:
                check_reads(setting, backend, arena, sums)
                problem = ""
            except UnsupportedError as error:
                problem = str(error)
            buffer = f"{arena.huge_nbytes / arena.nbytes:.0%} on huge pages"
            for write in (False, True):
                run = partial(hetero_pass, setting, backend, arena, write=write)
                contenders.append(_contender(f"hetero {backend}", huge, write, buffer, run, problem))
    return contenders


def fio_contenders(setting: Setting, stack: ExitStack) -> list[IOContender]:
    """fio's passes. Needs root to reserve huge pages; without, that column of fio is reported as not measured."""
    problem = why_no_fio()
    granted = stack.enter_context(reserved_huge_pages(setting.block_nbytes, setting.queue_depth, NUM_THREADS))
    no_huge = "" if granted else "no huge pages could be reserved (root, and free memory in one piece, are needed)"
    contenders = []
    for engine in FIO_ENGINES:
        for huge in (True, False):
            for write in (False, True):
                job = FioJob(
                    path=setting.path,
                    file_nbytes=setting.file_nbytes,
                    block_nbytes=setting.block_nbytes,
                    queue_depth=setting.queue_depth,
                    num_threads=NUM_THREADS,
                    engine=engine,
                    write=write,
                    huge_pages=huge,
                )
                buffer = "reserved huge pages" if huge else "ordinary mapping"
                why_not = problem or (no_huge if huge else "")
                contenders.append(_contender(f"fio {engine}", huge, write, buffer, partial(_fio_pass, job), why_not))
    return contenders


def _fio_pass(job: FioJob) -> Sample:
    try:
        result = run_fio(job)
    except RuntimeError as error:
        raise UnavailableError(str(error)) from error
    return Sample(result.seconds, result.cpu_s, result.nbytes)


def aio_contenders(setting: Setting, peer: Peer | None) -> list[IOContender]:
    settings = dict.fromkeys([(setting.block_nbytes, setting.queue_depth, 1), *AIO_SETTINGS])
    contenders = []
    for block_nbytes, queue_depth, num_threads in settings:
        program = f"DeepSpeed aio {block_nbytes >> 20}M/{queue_depth}/{num_threads}"
        for write in (False, True):
            problem = "" if peer else "not installed: no --peers-python was given"
            run = partial(_aio_pass, peer, setting, block_nbytes, queue_depth, num_threads, write)
            contenders.append(_contender(program, False, write, "its own page-locked tensor", run, problem))
    return contenders


def _aio_pass(
    peer: Peer | None, setting: Setting, block_nbytes: int, queue_depth: int, num_threads: int, write: bool
) -> Sample:
    assert peer is not None, "a contender without a peer has a problem and is not run"
    handle = {"block_nbytes": block_nbytes, "queue_depth": queue_depth, "num_threads": num_threads}
    peer.ask("aio_open", nbytes=setting.file_nbytes, **handle)
    answer = peer.ask("aio_run", path=str(setting.path), write=write)
    return Sample(answer["s"], answer["cpu_s"], setting.file_nbytes)


def _contender(
    program: str, huge: bool, write: bool, buffer: str, run: Callable[[], Sample], problem: str
) -> IOContender:
    name = f"{program}, {'write' if write else 'read'}, {'huge' if huge else 'ordinary'} pages"
    return IOContender(name=name, run=run, problem=problem, program=program, huge=huge, write=write, buffer=buffer)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workdir", type=Path, default=WORKDIR, help="folder on the disk to measure (default: build/bench)"
    )
    parser.add_argument("--size", type=int, default=4 << 30, help="bytes of the file (default: 4 GiB)")
    parser.add_argument("--block-size", type=int, default=4 << 20, help="bytes of a block (default: 4 MiB)")
    parser.add_argument("--queue-depth", type=int, default=8, help="blocks in flight (default: 8)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (default: 5)")
    parser.add_argument("--peers-python", type=Path, help="interpreter of an environment with DeepSpeed")
    parser.add_argument("--no-report", action="store_true", help="print only")
    options = parser.parse_args()
    # psync's threads divide the file among them, and every contender moves whole blocks
    if options.size <= 0 or options.size % (NUM_THREADS * options.block_size):
        parser.error(f"--size must be a multiple of {NUM_THREADS} * --block-size")
    return options


def main() -> None:
    options = parse_options()
    options.workdir.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hetero-bench-", dir=options.workdir)))
        setting = Setting(
            path=folder.absolute() / "data.bin",
            file_nbytes=options.size,
            block_nbytes=options.block_size,
            queue_depth=options.queue_depth,
            num_rounds=options.rounds,
            num_threads=NUM_THREADS,
        )
        sums = make_file(setting)
        arenas = make_arenas(setting, stack)
        contenders = hetero_contenders(setting, sums, arenas)
        contenders += fio_contenders(setting, stack)
        peer = stack.enter_context(Peer(options.peers_python)) if options.peers_python else None
        contenders += aio_contenders(setting, peer)
        run_rounds(contenders, num_rounds=options.rounds)
        write_io_report(setting, contenders, peer_versions(peer), write=not options.no_report)


def peer_versions(peer: Peer | None) -> dict[str, str]:
    found = {} if why_no_fio() else {"fio": fio_version()}
    if peer is not None:
        with suppress(UnavailableError):
            found["deepspeed"] = peer.ask("version", package="deepspeed")["version"]
    return found


if __name__ == "__main__":
    main()
