"""The memory of a run: arenas per tier, residents in their places, rings for the rest, and the executor over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor, nn

from hetero.io.arena import Arena
from hetero.io.engine import Engine, File, Request
from hetero.io.operation import finish
from hetero.materialize import small_tensor
from hetero.memory.budget import Ledger
from hetero.memory.chunk import Chunk
from hetero.memory.device import ArenaLike, Device
from hetero.memory.executor import Executor
from hetero.memory.loader import ResidentLoader
from hetero.memory.ring import Ring
from hetero.memory.schedule import stays_of
from hetero.memory.sizes import format_need
from hetero.planning import Decision
from hetero.report.progress import Progress, ProgressCallback


class Tiers:
    """Takes what a decision says from the ledger and the device, and fills it. `memory` owns every arena: whoever
    closes it does so after the executor, the engine and the device."""

    def __init__(
        self,
        decision: Decision,
        *,
        device: Device,
        engine: Engine,
        files: Mapping[Path, File],
        memory: ExitStack,
        progress: ProgressCallback | None,
    ) -> None:
        self._decision, self._device, self._engine, self._files = decision, device, engine, files
        self._memory, self._progress = memory, progress
        self.arenas: dict[str, ArenaLike] = {}
        self.ledger = Ledger(decision.limits.ledger_limits())
        self.ledger.remedy = _remedy
        self.ledger.note("interpreter and libraries", decision.limits.baseline.total_nbytes)
        for tier, holders in decision.reserves.holders.items():
            for holder, nbytes in holders.items():
                self.ledger.take(tier, holder, nbytes)

    def allocate(self, tier: str, nbytes: int, name: str, *, is_reserved: bool = False) -> ArenaLike:
        """Allocate for the life of the run. `is_reserved`: the ledger has it already."""
        if not is_reserved:
            self.ledger.take(tier, name, nbytes)
            self._memory.callback(self.ledger.give, tier, name, nbytes)
        allocate = self._device.allocate if tier == "gpu" else self._device.allocate_host
        arena = allocate(nbytes, name=name)
        self._memory.callback(arena.close)
        return arena

    def load_small(self, model: nn.Module) -> None:
        """Read vectors and other small parameters; they keep their file offset modulo 64."""
        layout, dtype = self._decision.layout, self._decision.source.dtype
        torch_device = self._device.torch_device
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
            value = small_tensor(param, memory[offset : offset + param.nbytes], dtype).to(torch_device)
            shared = nn.Parameter(value, requires_grad=False) if param.kind == "parameter" else value
            for name in param.names:
                put(model, name, shared)
        for name, buffer in list(model.named_buffers()):
            if buffer.device != torch_device:
                put(model, name, buffer.to(torch_device))

    def make_executor(self) -> Executor:
        """Allocate both tiers, load the residents (blocks), and return the executor; the caller closes it."""
        decision, plan = self._decision, self._decision.plan
        chunks = {chunk.chunk_id: chunk for chunk in decision.layout.chunks}
        sizes = {i: chunk.nbytes for i, chunk in chunks.items()}
        ring_nbytes = {"gpu": plan.gpu_ring_nbytes, "cpu": plan.cpu_ring_nbytes}
        residents = {"gpu": sorted(plan.gpu_resident), "cpu": sorted(plan.cpu_resident)}
        places: dict[str, dict[int, int]] = {"gpu": {}, "cpu": {}}
        rings: dict[str, Ring] = {}
        arenas = self.arenas
        for tier in ("gpu", "cpu") if decision.has_gpu_tier else ("cpu",):
            total = sum(sizes[i] for i in residents[tier]) + ring_nbytes[tier]
            arena = self.allocate(tier, total, "weights") if total else None
            address = arena.address if arena else 0
            if arena:
                arenas[tier] = arena
            for chunk_id in residents[tier]:
                places[tier][chunk_id] = address
                address += sizes[chunk_id]
            rings[tier] = Ring(address, ring_nbytes[tier])
        self._load_residents(places)
        first = decision.first_tier
        moments = [moment.chunk_ids for moment in decision.trace.moments]
        return Executor(
            decision.layout.chunks,
            device=self._device,
            engine=self._engine,
            files=self._files,
            first=rings[first],
            staging=rings["cpu"] if first == "gpu" else None,
            resident=places[first],
            host={i: (address, sizes[i]) for i, address in places["cpu"].items()} if first == "gpu" else {},
            schedule=stays_of(moments, set(plan.schedule)),
            keepers=[arenas[first].keeper] if first in arenas else [],
        )

    def _load_residents(self, places: Mapping[str, Mapping[int, int]]) -> None:
        chunks = {chunk.chunk_id: chunk for chunk in self._decision.layout.chunks}
        total = sum(chunks[i].read_nbytes for tier in places.values() for i in tier)
        loader = ResidentLoader(self._engine, self._files, self._device)

        def tell(done_nbytes: int) -> None:
            if self._progress is not None:
                self._progress(Progress("load", done_nbytes, total))

        tell(0)
        if places["gpu"]:
            self._load_through(loader, [(chunks[i], address) for i, address in places["gpu"].items()], tell)
        loader.load([(chunks[i], address) for i, address in places["cpu"].items()], progress=tell)
        tell(total)

    def _load_through(
        self, loader: ResidentLoader, chunks: list[tuple[Chunk, int]], tell: Callable[[int], None]
    ) -> None:
        """Gpu residents come through the cpu arena before anything else lives there, or through a passing one."""
        largest = max(chunk.nbytes for chunk, _ in chunks)
        arena = self.arenas.get("cpu")
        if arena is not None and arena.nbytes >= largest:
            loader.load(chunks, staging=Ring(arena.address, arena.nbytes), progress=tell)
            return
        with self.ledger.hold("cpu", "load staging", largest):
            passing = self._device.allocate_host(largest, name="load staging")
            try:
                loader.load(chunks, staging=Ring(passing.address, passing.nbytes), progress=tell)
            finally:
                passing.close()


def put(model: nn.Module, name: str, value: Tensor) -> None:
    """Put a parameter or a buffer where `name` says, without a copy."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path) if path else model
    holder = module._parameters if leaf in module._parameters else module._buffers
    holder[leaf] = value  # type: ignore[assignment]


def _remedy(tier: str, holder: str, short_nbytes: int) -> str:
    return f"Raise {tier}_memory by at least {format_need(short_nbytes)}, or use a smaller context."
