"""A pass reads what is not resident and nothing else, nothing is written, and no budget is exceeded at any moment."""

from __future__ import annotations

import gc
import json
import struct
import weakref
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import hetero
from hetero.io.arena import Arena
from hetero.measure import ComputeRates, measure_compute
from hetero.memory.chunk import Chunk
from hetero.memory.device import CpuDevice
from hetero.memory.device_emulated import EmulatedDevice
from hetero.memory.ledger import Ledger, LedgerEvent
from hetero.planning import TooSmallError
from hetero.run import Run
from tests.tiny_models import VOCAB, write_checkpoint

CONTEXT = 64
CHUNK_NBYTES = 48 << 10
PAGE = 4096
MERGED_GAP = 64 << 10  # tensors of a chunk that lie this close in the file are one read, with what is between them
NUM_PASSES = 4

CASES: dict[str, dict[str, Any]] = {
    "sharded": {"tied": False, "max_shard_size": "200KB"},
    "tied": {"tied": True},
    "bf16-misaligned": {"dtype": torch.bfloat16, "misaligned": True},
}
SHARES = [0.0, 0.4, 1.5]


class Headers:
    """Where every tensor lies, by a reading of the safetensors headers that shares nothing with ours."""

    def __init__(self, folder: Path) -> None:
        self.tensors: dict[str, tuple[Path, int, int]] = {}
        self.rows: dict[str, int] = {}
        for path in folder.glob("*.safetensors"):
            with path.open("rb") as file:
                (header_nbytes,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(header_nbytes))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                start, end = entry["data_offsets"]
                self.tensors[name] = (path, 8 + header_nbytes + start, 8 + header_nbytes + end)
                self.rows[name] = entry["shape"][0]

    def row_nbytes(self, name: str) -> int:
        _, start, end = self.tensors[name]
        return (end - start) // self.rows[name]

    def extents_nbytes(self, chunk: Chunk) -> int:
        """Bytes of the pages that hold the chunk's rows of its tensors, to the end of the file at most."""
        ranges = []
        for placed in chunk.parts:
            path, start, end = self.tensors[placed.part.name]
            if placed.part.num_rows is not None:
                start += placed.part.first_row * self.row_nbytes(placed.part.name)
                end = start + placed.part.num_rows * self.row_nbytes(placed.part.name)
            ranges.append((path, start, end))
        merged: list[tuple[Path, int, int]] = []
        for path, start, end in sorted(ranges):
            if merged and merged[-1][0] == path and start - merged[-1][2] <= MERGED_GAP:
                start = merged.pop()[1]
            merged.append((path, start, end))
        return sum(
            min(-(-end // PAGE) * PAGE, path.stat().st_size) - start // PAGE * PAGE for path, start, end in merged
        )


@pytest.fixture(autouse=True)
def measure_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """How fast this machine computes is not what these tests are about, and takes a while to measure."""
    monkeypatch.setattr("hetero.setup.measure_compute", lambda dtype, formats, device: rates_of(dtype))


@cache
def rates_of(dtype: torch.dtype) -> ComputeRates:
    return measure_compute(dtype, set(), CpuDevice())


@pytest.fixture(scope="module", params=list(CASES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp(request.param), "llama", **CASES[request.param])


@cache
def smallest(folder: Path, device: str) -> dict[str, int]:
    """The smallest budgets that work, as the error names them."""
    tiers = ("cpu",) if device == "cpu" else ("gpu", "cpu")
    with pytest.raises(TooSmallError) as caught:
        hetero.load(folder, device=device, **options(dict.fromkeys(tiers, PAGE)))
    return caught.value.needs


def budgets_for(folder: Path, device: str, share: float) -> dict[str, int]:
    """The smallest budgets and a share of the model's bytes more, two thirds of it in RAM where there are two tiers."""
    needs = smallest(folder, device)
    extra = int(share * sum(path.stat().st_size for path in folder.glob("*.safetensors")))
    if device == "cpu":
        return {"cpu": needs["cpu"] + extra}
    return {"gpu": needs["gpu"] + extra // 3, "cpu": needs["cpu"] + extra * 2 // 3}


def options(budgets: dict[str, int]) -> dict[str, Any]:
    memory = {f"{tier}_memory": nbytes for tier, nbytes in budgets.items()}
    return {"context": CONTEXT, "chunk_nbytes": CHUNK_NBYTES, **memory}


def settle(run: Run) -> tuple[int, int]:
    """Wait until nothing is in flight; returns useful bytes read, and bytes copied, so far for what has been used."""
    run.executor.settle()
    read_ahead, copied_ahead = run.executor.ahead()
    read = sum(file.useful_read_nbytes for file in run.engine_stats().files)
    return read - read_ahead, run.executor.stats.copied_nbytes - copied_ahead


def decode_passes(run: Run, num_passes: int) -> Iterator[tuple[int, int]]:
    """Bytes read, and copied, by each of some passes of one token."""
    model: Any = run.model
    past = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.randint(3, VOCAB, (1, 5)), cache=past, use_cache=True)
        before = settle(run)
        for token in range(num_passes):
            model(input_ids=torch.tensor([[7 + token]]), cache=past, use_cache=True)
            after = settle(run)
            yield after[0] - before[0], after[1] - before[1]
            before = after


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_a_pass_reads_total_minus_resident(folder: Path, device: str, share: float) -> None:
    headers = Headers(folder)
    with hetero.load(folder, device=device, **options(budgets_for(folder, device, share))) as run:
        plan, layout = run.decision.plan, run.decision.layout
        tables = {chunk_id for table in layout.tables.values() for chunk_id in table.chunk_ids}
        resident = plan.gpu_resident | plan.cpu_resident
        chunks = {chunk.chunk_id: chunk for chunk in layout.chunks}
        read = {i: headers.extents_nbytes(chunk) for i, chunk in chunks.items() if i not in tables}
        expected = sum(read.values()) - sum(read[i] for i in resident - tables)
        embedding = "model.embed_tokens.weight"
        (table,) = [w for w in [*layout.weights.values(), *layout.tables.values()] if embedding in w.source.names]
        token_chunk = table.chunk_ids[0]  # of the first 64 rows, where the tokens of this test are
        if token_chunk not in resident:
            expected += headers.row_nbytes(embedding)
        copied = 0
        if device == "emulated":
            copied = sum(chunk.nbytes for i, chunk in chunks.items() if i not in tables and i not in plan.gpu_resident)
        assert list(decode_passes(run, NUM_PASSES)) == [(expected, copied)] * NUM_PASSES
        assert all(file.num_writes == file.written_nbytes == 0 for file in run.engine_stats().files)
        assert run.executor.stats.num_demands == run.executor.stats.num_abandoned == 0
        run.source.index.verify()


class Watch:
    """Every allocation of an arena and every event of the ledger, checked against the budgets as it happens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, budgets: dict[str, int]) -> None:
        self.budgets = budgets
        self.num_events = 0
        self.devices: list[EmulatedDevice] = []
        self.arenas: list[tuple[str, int, weakref.ref[Any]]] = []
        init, init_device = Arena.__init__, EmulatedDevice.__init__

        def init_and_check(arena: Arena, nbytes: int, **options: Any) -> None:
            init(arena, nbytes, **options)
            self.arenas.append((arena.name, arena.nbytes, weakref.ref(arena._mapping)))
            self.check()

        def init_device_and_keep(device: EmulatedDevice, *args: Any, **options: Any) -> None:
            init_device(device, *args, **options)
            self.devices.append(device)

        monkeypatch.setattr(Arena, "__init__", init_and_check)
        monkeypatch.setattr(EmulatedDevice, "__init__", init_device_and_keep)
        monkeypatch.setattr("hetero.tiers.Ledger", partial(Ledger, observer=self.happened))

    def happened(self, ledger: Ledger, event: LedgerEvent) -> None:
        self.num_events += 1
        assert event.used_nbytes == sum(ledger.holders(event.tier).values()) <= self.budgets[event.tier]
        self.check()

    def check(self) -> None:
        """What is really mapped is within the budgets. What an emulated GPU holds is RAM that counts as its own."""
        on_device = {arena.address for device in self.devices for arena in device._arenas}
        held = {"gpu": 0, "cpu": 0}
        for name, nbytes, mapping in self.arenas:
            if (mapped := mapping()) is not None:
                is_on_gpu = mapped.address in on_device or (self.devices and name == "small weights")
                held["gpu" if is_on_gpu else "cpu"] += nbytes
        assert all(held[tier] <= self.budgets.get(tier, 0) for tier in held), f"{held=}, {self.budgets=}"


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_no_budget_is_exceeded_at_any_moment(
    folder: Path, device: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets = budgets_for(folder, device, share)
    watch = Watch(monkeypatch, budgets)
    with hetero.load(folder, device=device, **options(budgets)) as run:
        for tier, nbytes in budgets.items():
            assert run.ledger.limit(tier) == nbytes
        list(decode_passes(run, NUM_PASSES))
        assert watch.num_events > len(budgets)
        assert all(run.ledger.peak(tier) <= nbytes for tier, nbytes in budgets.items())
        # At the smallest budgets nothing is to spare, so the peak shows that the sum is the true one.
        used = {tier: run.ledger.peak(tier) for tier in budgets}
        assert share > 0 or used == budgets
    del run
    gc.collect()
    left = [name for name, _, mapping in watch.arenas if mapping() is not None]
    assert not left, "arenas that outlive their run"
