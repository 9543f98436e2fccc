"""A checkpoint from a cold disk to CPU tensors: hetero beside safetensors, fastsafetensors and the Run:ai streamer.

    python benchmarks/cold_load.py --workdir DIR [--model FOLDER] [--peers-python PYTHON]

Every round each loader, in a process of its own that has imported everything, loads the checkpoint after the page cache
was dropped (root) and then reads a number from every page of every tensor, all of which are alive. The sum of those
numbers must be the same for all. Time is from the call to the last page, the allocation of memory included. Figures are
medians over the rounds, ratios medians of the rounds' own ratios.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import psutil
from _cgroup import drop_page_cache
from _io_peers import Peer
from _models import weight_nbytes
from _report import details, machine_facts, markdown_table, public_command, report_path, write_report
from _rounds import Contender, Sample, UnavailableError, own_cpu_s, run_rounds, verdict

from hetero.io.arena import Arena, round_up
from hetero.io.engine import Engine, Request

WORKDIR = Path(__file__).resolve().parents[1] / "build" / "bench"
RIVALS = ("safetensors", "fastsafetensors", "runai-model-streamer")
DISK_LIMIT = "(disk limit)"
FLOOR = 1.3
SETTING = """\
Time from the call to a number read from every 4096 bytes of every tensor, with all tensors alive. Before each load the
page cache is dropped, and twice the checkpoint's size of memory is touched and freed: a virtual machine hands memory
that was idle for seconds back to its host, and taking it again is slower than any disk. One process per loader, imports
done; one round is thrown away; every other round goes backwards. All loaders gave the same sum of the numbers read.
Peak: the most memory resident in the process during the load, beyond what it had before; pages of a mapped file count.

- hetero: `hetero.io.load.load_arrays` (O_DIRECT, io_uring where there is one), each array viewed as a tensor.
- safetensors: `safetensors.torch.load_file` of each shard: a mapping, read when it is touched.
- fastsafetensors: `SafeTensorsFileLoader` with `nogds=True`, all shards as one group.
- (disk limit): the same bytes by O_DIRECT into one arena of 64 MiB, which is used again and again.
- runai-model-streamer: `SafetensorsStreamer.stream_files` of all shards, tensors owned by the caller.
"""


class Loader:
    """One loader in its process. All loaders of a run share `sums`, the checksums seen so far by loader."""

    def __init__(self, name: str, peer: Peer, model: Path, sums: dict[str, int]) -> None:
        self._name, self._peer, self._model, self._sums = name, peer, model, sums
        self.version = peer.ask("prepare", loader=name)["version"]

    def load(self) -> Sample:
        drop_page_cache()
        touch_memory(2 * weight_nbytes(self._model))
        answer = self._peer.ask("load", loader=self._name, path=str(self._model))
        self._sums[self._name] = answer["checksum"]
        if len(set(self._sums.values())) > 1:
            sys.exit(f"the loaders do not agree about the numbers in the checkpoint: {self._sums}")
        peak_nbytes = answer["peak_nbytes"] - answer["before_nbytes"]
        return Sample(answer["s"], answer["cpu_s"], weight_nbytes(self._model), peak_nbytes)


class DiskLimit:
    """The bound for every loader: the same bytes by O_DIRECT into one small arena, where nothing is kept."""

    def __init__(self, model: Path, arena: Arena) -> None:
        self._model, self._arena = model, arena

    def read(self) -> Sample:
        drop_page_cache()
        size = 4 << 20
        with Engine(block_nbytes=size) as engine:
            files = [engine.open(path) for path in sorted(self._model.glob("*.safetensors"))]
            blocks = [(file, offset) for file in files for offset in range(0, file.nbytes, size)]
            start_s, cpu_s = time.perf_counter(), own_cpu_s()
            futures = engine.submit(
                [
                    # to whole pages, so that nothing is bounced; buffers are written over, nobody looks
                    Request(file, offset, min(size, round_up(file.nbytes - offset, 4096)), self._address(i, size))
                    for i, (file, offset) in enumerate(blocks)
                ]
            )
            nbytes = sum(future.result() for future in futures)
            return Sample(time.perf_counter() - start_s, own_cpu_s() - cpu_s, nbytes)

    def _address(self, block: int, size: int) -> int:
        return self._arena.address + block % (self._arena.nbytes // size) * size


def touch_memory(nbytes: int) -> None:
    """Use and free memory, so that the machine has it ready (see SETTING). Takes at most half of what is available."""
    Arena(min(nbytes, psutil.virtual_memory().available // 2), name="touched before a load").close()


def contenders_for(model: Path, peers_python: Path | None, stack: ExitStack) -> tuple[list[Contender], dict[str, str]]:
    """The loaders and their versions. One that is missing is a contender with a problem."""
    contenders, versions, sums = [], {}, dict[str, int]()
    for name in ("hetero", *RIVALS):
        python = Path(sys.executable) if name == "hetero" else peers_python
        contender = Contender(name, partial(_never, name))
        contenders.append(contender)
        if python is None:
            contender.problem = "not installed: no --peers-python was given"
            continue
        try:
            loader = Loader(name, stack.enter_context(Peer(python)), model, sums)
        except UnavailableError as error:
            contender.problem = str(error)
            continue
        contender.run, versions[name] = loader.load, loader.version
    arena = stack.enter_context(Arena(64 << 20, name="disk limit"))
    contenders.append(Contender(DISK_LIMIT, DiskLimit(model, arena).read))
    return contenders, versions


def _never(name: str) -> Sample:
    raise UnavailableError(f"{name} was not started")


def result_rows(contenders: list[Contender]) -> list[list[str]]:
    hetero = contenders[0]
    rows = []
    for contender in contenders:
        if not contender.samples:
            rows.append([contender.name, "-", "-", "-", "-", "-"])
            continue
        rows.append(
            [
                contender.name,
                f"{statistics.median(sample.seconds for sample in contender.samples):.2f}",
                f"{contender.bytes_per_s / 1e9:.2f}",
                f"{hetero.ratio_to(contender):.2f}" if hetero.samples else "-",
                f"{contender.cpu_s_per_gb:.2f}",
                f"{max(sample.peak_nbytes for sample in contender.samples) / 2**30:.2f}",
            ]
        )
    return rows


def outcome(contenders: list[Contender]) -> str:
    hetero, *rivals = contenders
    measured = [rival for rival in rivals if rival.samples and rival.name != DISK_LIMIT]
    limit = next((rival for rival in rivals if rival.samples and rival.name == DISK_LIMIT), None)
    if not hetero.samples or not measured:
        return "No rival was measured beside hetero, so nothing is said about the target."
    fastest = max(measured, key=lambda rival: rival.bytes_per_s)
    ratio = hetero.ratio_to(fastest)
    text = f"{ratio:.2f} x the fastest rival ({fastest.name}); target {FLOOR}: {verdict(ratio, FLOOR)}."
    if limit is not None:
        shares = f"hetero {hetero.ratio_to(limit):.2f}, {fastest.name} {fastest.ratio_to(limit):.2f}"
        text += f" Shares of the disk's own rate: {shares}; no loader can be faster than 1."
    return text


def report(model: Path, contenders: list[Contender], versions: dict[str, str], num_rounds: int, *, write: bool) -> None:
    """Print the results and, with `write`, write today's report."""
    machine = machine_facts(model)
    results = markdown_table(
        ["loader", "s", "GB/s", "hetero is faster by", "CPU s/GB", "peak GiB"], result_rows(contenders)
    )
    missing = "\n".join(f"- {c.name}: {c.problem}" for c in contenders if c.problem) or "Everything was measured."
    print(results, outcome(contenders), missing, sep="\n\n")
    if not write:
        return
    facts = [*machine.rows(), *versions.items()]
    size = f"{weight_nbytes(model) / 1e9:.2f} GB in {len(list(model.glob('*.safetensors')))} shards"
    path = report_path("cold_load", machine)
    sections = [
        ("Results", f"{results}\n\n{outcome(contenders)}"),
        ("Not measured", missing),
        ("Setting", f"A Llama-shaped checkpoint of {size}; {num_rounds} rounds.\n\n{SETTING}"),
        ("Machine and versions", markdown_table(["", ""], facts)),
        ("Command", f"`{public_command(sys.argv)}`"),
        ("Samples", details("one figure a round", "\n".join(c.raw_line() for c in contenders if c.samples))),
    ]
    write_report(path, "A cold checkpoint to CPU tensors", sections)
    print(f"\nwritten: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workdir", type=Path, default=WORKDIR, help="folder on the disk to measure (default: build/bench)"
    )
    parser.add_argument(
        "--model", type=Path, help="folder with .safetensors (default: make one of 2.7 GB in --workdir)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (default: 5)")
    parser.add_argument("--peers-python", type=Path, help="interpreter of an environment with the rivals")
    parser.add_argument("--no-report", action="store_true", help="print only")
    options = parser.parse_args()
    try:
        drop_page_cache()
    except PermissionError:
        sys.exit("cold_load: dropping the page cache needs root; run it as root")
    model = (options.model or make_model(options.workdir)).absolute()
    with ExitStack() as stack:
        contenders, versions = contenders_for(model, options.peers_python, stack)
        run_rounds(contenders, num_rounds=options.rounds)
        report(model, contenders, versions, options.rounds, write=not options.no_report)


def make_model(workdir: Path) -> Path:
    """Make the benchmarks' checkpoint if it is not there, in a process whose memory is gone when it ends."""
    subprocess.run([sys.executable, Path(__file__).with_name("_models.py"), workdir], check=True)
    return workdir / "llama"


if __name__ == "__main__":
    main()
