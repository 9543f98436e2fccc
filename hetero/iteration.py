"""What an iteration of a wrapped model does, and where its weights are best for that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress

from hetero.memory.activations import ACTIVATIONS
from hetero.memory.budget import Ledger, MemoryLimits
from hetero.memory.gradients import GRADIENTS
from hetero.memory.homes import WEIGHTS
from hetero.memory.plan import make_plan
from hetero.memory.plan_types import BudgetError, Budgets, ChunkSpec, Links, Moment, Plan, Trace, uses_of
from hetero.memory.sizes import format_size, format_time
from hetero.memory.trace import Recorder
from hetero.memory.weights import Place, WeightChunk
from hetero.placing import RING, Placing
from hetero.report.wrapped import TierShare, WrapPlan

FORWARD, TRAIN, BACKWARD = "forward", "forward with autograd", "backward"


class IterationPlanner:
    """Turns recorded passes and the ledger into a plan, and a plan into words. It moves nothing."""

    def __init__(
        self,
        placing: Placing,
        recorder: Recorder,
        *,
        ledger: Ledger,
        limits: MemoryLimits,
        links: Links,
        names: Mapping[int, str],
    ) -> None:
        """`names`: of the modules, by id."""
        self._placing, self._recorder, self._ledger = placing, recorder, ledger
        self._limits, self._links, self._names = limits, links, names
        self._planned_ids: set[int] = set()
        self._activation_peaks: dict[str, int] = {}

    def sees_new_uses(self, phase: str) -> bool:
        """Whether the phase was recorded for the first time, or has used chunks that no plan has seen used. Another
        order alone is followed at once and needs no plan."""
        used = {chunk_id for order in self._orders() for chunk_ids in order for chunk_id in chunk_ids}
        is_new = self._recorder.num_passes(phase) == 1 or bool(used - self._planned_ids)
        self._planned_ids |= used
        return is_new

    def note_peak(self) -> None:
        """Remember how many bytes saved activations hold now, if it is more than ever."""
        for tier in self._ledger.tiers():
            now = self._ledger.held(tier, ACTIVATIONS)
            self._activation_peaks[tier] = max(self._activation_peaks.get(tier, 0), now)

    def make(self) -> tuple[Plan, dict[str, int]] | None:
        """The best placement for what was recorded, and the bytes per tier it was made for. None: nothing was recorded,
        or not even the smallest fits (saved activations will have to leave again; weights stream as they do)."""
        trace = self._trace()
        if trace is None:
            return None
        # What others look at cannot leave the first tier. Behind a gpu tier it is in RAM, and streams like the rest.
        kept = {c.chunk_id for c in self._placing.watched() if c.place is Place.FIRST}
        specs = [
            ChunkSpec(chunk_id=c.chunk_id, nbytes=c.slot_nbytes, read_nbytes=c.slot_nbytes, pinned=c.chunk_id in kept)
            for c in self._placing.chunks
        ]
        room = {tier: max(0, self._ledger.limit(tier) - self._held(tier)) for tier in self._ledger.tiers()}
        if not self._placing.is_remote or not self._ledger.held("gpu", GRADIENTS):
            return self._plan(specs, trace, room)
        return self._plan_with_gradients(specs, trace, room)

    def _plan(
        self, specs: Sequence[ChunkSpec], trace: Trace, room: dict[str, int]
    ) -> tuple[Plan, dict[str, int]] | None:
        budgets = Budgets(room["gpu"] if self._placing.first == "gpu" else None, room["cpu"])
        with suppress(BudgetError):
            return make_plan(specs, trace, budgets, self._links), room
        return None

    def _plan_with_gradients(
        self, specs: Sequence[ChunkSpec], trace: Trace, room: dict[str, int]
    ) -> tuple[Plan, dict[str, int]] | None:
        """The best placement that leaves RAM for the gradients of what it streams. Which do, only the placement says:
        so there is room for all of them first, then for those of the placement made so."""
        free_nbytes = room["cpu"] + self._ledger.held("cpu", GRADIENTS)

        def with_room_for(gradients_nbytes: int) -> tuple[Plan, dict[str, int]] | None:
            made = self._plan(specs, trace, room | {"cpu": max(0, free_nbytes - gradients_nbytes)})
            return made if made is not None and self._gradients_at_home(made[0]) <= gradients_nbytes else None

        made = with_room_for(self._gradients_at_home(None)) or with_room_for(self._ledger.held("cpu", GRADIENTS))
        if made is None:
            return None
        return with_room_for(self._gradients_at_home(made[0])) or made

    def _gradients_at_home(self, plan: Plan | None) -> int:
        """Bytes of gradients that go to RAM at most, where a plan places the weights (None: anywhere)."""
        resident = plan.gpu_resident if plan is not None else frozenset()
        return sum(c.trainable_nbytes for c in self._placing.chunks if c.chunk_id not in resident)

    def _trace(self) -> Trace | None:
        """The last iteration, and what other iterations used beside it."""
        parts = [self._recorder.trace(phase) for phase in (TRAIN, BACKWARD)]
        if parts[0] is None or parts[1] is None:
            parts = [self._recorder.trace(FORWARD) or parts[0]]
        moments: list[Moment] = []
        starts = set()  # copies of homes exist only inside a pass, so each begins with empty rings
        for part in parts:
            if part is not None:
                starts.add(len(moments))
                moments += part.moments
        if not moments:
            return None
        rare = self._planned_ids - {chunk_id for moment in moments for chunk_id in moment.chunk_ids}
        for module, chunks in self._placing.own.items():
            chunk_ids = tuple(chunk.chunk_id for chunk in chunks)
            if rare.intersection(chunk_ids):
                moments.append(Moment(self._names[module], chunk_ids, 0.0))
        return Trace("iteration", tuple(moments), frozenset(starts))

    def _orders(self) -> list[list[tuple[int, ...]]]:
        """The chunks of each moment of an iteration, per phase: of training if there was any, else of a forward."""
        phases = [phase for phase in (TRAIN, BACKWARD) if self._recorder.num_passes(phase)] or [FORWARD]
        return [self._recorder.order(phase) for phase in phases if self._recorder.num_passes(phase)]

    def _held(self, tier: str) -> int:
        """What is neither weights nor ring, with saved activations at their peak."""
        held = self._ledger.holders(tier)
        others = sum(n for holder, n in held.items() if holder not in (WEIGHTS, RING, ACTIVATIONS))
        return others + max(held.get(ACTIVATIONS, 0), self._activation_peaks.get(tier, 0))

    def explain(self) -> list[str]:
        """One line per chunk: where it is, why, and what that costs or saves in every iteration."""
        orders = self._orders()
        streamed = frozenset(chunk.chunk_id for chunk in self._placing.streamed)
        stays = Counter(use.chunk_id for order in orders for use in uses_of(order, streamed))
        lines = []
        for chunk in self._placing.chunks:
            num_stays = stays[chunk.chunk_id]
            if chunk.chunk_id not in streamed:
                with_it = streamed | {chunk.chunk_id}
                num_stays = sum(use.chunk_id == chunk.chunk_id for order in orders for use in uses_of(order, with_it))
            names = f" and {len(chunk.views) - 1} more" if len(chunk.views) > 1 else ""
            lines.append(f"{chunk.name}{names}: {format_size(chunk.nbytes)}, {self._reason(chunk, num_stays)}")
        return [*lines, "buffers and smaller weights never move"]

    def _reason(self, chunk: WeightChunk, num_stays: int) -> str:
        placing, links = self._placing, self._links
        tier = placing.homes.tier_of(chunk.place)
        if chunk.place is not Place.DISK and placing.homes.is_watched(chunk):
            return f"kept in {tier} by tensors outside the model"
        where = f"stays in {tier}" if chunk.place is Place.FIRST else f"streams from {tier}"
        if not num_stays:
            return f"{where}; no iteration has used it yet"
        comes_from_disk = chunk.place is Place.DISK or (chunk.place is Place.FIRST and placing.homes.has_disk)
        time_s = chunk.slot_nbytes / links.disk_bytes_per_s if comes_from_disk else 0.0
        if placing.first == "gpu" and links.gpu_bytes_per_s is not None:
            time_s += chunk.nbytes / links.gpu_bytes_per_s
        if not time_s:
            return where
        verb = "saves at most" if chunk.place is Place.FIRST else "costs"
        times = "once" if num_stays == 1 else f"{num_stays} times"
        return f"{where}, which {verb} {format_time(time_s)} of transfer {times} per iteration"

    def describe(self, plan: Plan | None) -> WrapPlan:
        """Where the weights are now, and what an iteration like the last one costs there."""
        placing, homes = self._placing, self._placing.homes
        shares = {}
        for tier in self._ledger.tiers():
            held = self._ledger.holders(tier)
            placed = sum(c.nbytes for c in placing.chunks if homes.tier_of(c.place) == tier)
            shares[tier] = TierShare(self._ledger.limit(tier), placed, held.get(RING, 0), self._held(tier))
        by_id = {chunk.chunk_id: chunk for chunk in placing.chunks}
        streamed = frozenset(chunk.chunk_id for chunk in placing.streamed)
        stays = [by_id[use.chunk_id] for order in self._orders() for use in uses_of(order, streamed)]
        prediction = plan.prediction if plan is not None else None
        return WrapPlan(
            state="planned" if plan is not None else "warm-up",
            num_chunks=len(placing.chunks),
            num_streamed=len(streamed),
            tiers=shares,
            activations_nbytes=self._activation_peaks.get(placing.first, 0),
            disk_nbytes=sum(c.slot_nbytes for c in stays if c.place is Place.DISK),
            gpu_link_nbytes=sum(
                c.host_range[1] if c.place is Place.CPU else c.slot_nbytes for c in stays
            ) if placing.first == "gpu" else 0,
            time_s=prediction.time_s if prediction else None,
            bound_s=prediction.bound_s if prediction else None,
            bottleneck=prediction.bottleneck if prediction else None,
            notes=self._limits.lines(),
        )  # fmt: skip
