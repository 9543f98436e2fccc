"""What the planner's and the simulator's tests share: small workloads and the optimum by trying everything."""

from __future__ import annotations

from itertools import product

from hypothesis import strategies as st

from hetero.memory.plan import Budgets, ChunkSpec, Links, Moment, Residents, Trace
from hetero.memory.schedule import stays_of

PAGE = 4096


def chunk(chunk_id: int, num_pages: int = 1, read_nbytes: int | None = None) -> ChunkSpec:
    """A chunk of `num_pages` pages that a read takes whole."""
    nbytes = num_pages * PAGE
    return ChunkSpec(chunk_id=chunk_id, nbytes=nbytes, read_nbytes=nbytes if read_nbytes is None else read_nbytes)


def one_each(num_moments: int, compute_s: float = 1.0) -> Trace:
    """Moment i uses chunk i alone."""
    return Trace("decode", tuple(Moment(f"layer {i}", (i,), compute_s) for i in range(num_moments)))


def free_of(chunks: list[ChunkSpec], trace: Trace) -> list[ChunkSpec]:
    used = {i for moment in trace.moments for i in moment.chunk_ids}
    return [c for c in chunks if c.chunk_id in used and not c.pinned and not c.by_rows]


def ring_need(trace: Trace, streamed: dict[int, ChunkSpec]) -> int:
    return max((sum(streamed[i].nbytes for i in set(m.chunk_ids) if i in streamed) for m in trace.moments), default=0)


def traffic(chunks: list[ChunkSpec], trace: Trace, first: set[int], second: set[int], *, gpu: bool) -> tuple[int, int]:
    """(disk bytes, gpu link bytes) per pass of streamed chunks, counted on the executor's own schedule."""
    specs = {c.chunk_id: c for c in free_of(chunks, trace)}
    stays = stays_of((m.chunk_ids for m in trace.moments), set(specs) - first)
    disk_nbytes = sum(specs[stay.chunk_id].read_nbytes for stay in stays if stay.chunk_id not in second)
    return disk_nbytes, sum(specs[stay.chunk_id].nbytes for stay in stays) if gpu else 0


def traffic_of(chunks: list[ChunkSpec], trace: Trace, residents: Residents, *, gpu: bool) -> tuple[int, int]:
    first, second = (residents.gpu_resident, residents.cpu_resident) if gpu else (residents.cpu_resident, frozenset())
    return traffic(chunks, trace, set(first), set(second), gpu=gpu)


def optimum(chunks: list[ChunkSpec], trace: Trace, budgets: Budgets) -> tuple[int, int] | None:
    """The least traffic of all choices within the budgets, rings included; None when nothing fits."""
    gpu = budgets.gpu_nbytes is not None
    free = free_of(chunks, trace)
    pinned = sum(c.nbytes for c in chunks if c.pinned)
    first_budget = budgets.cpu_nbytes if budgets.gpu_nbytes is None else budgets.gpu_nbytes
    best: tuple[int, int] | None = None
    for tiers in product("fsd" if gpu else "fd", repeat=len(free)):
        placed = list(zip(free, tiers, strict=True))
        streamed = {c.chunk_id: c for c, tier in placed if tier != "f"}
        first = sum(c.nbytes for c, tier in placed if tier == "f") + pinned + ring_need(trace, streamed)
        staging = max((c.nbytes for c, tier in placed if tier == "d"), default=0)
        second = sum(c.nbytes for c, tier in placed if tier == "s") + staging
        if first > first_budget or (gpu and second > budgets.cpu_nbytes):
            continue
        found = traffic(
            chunks,
            trace,
            {c.chunk_id for c, tier in placed if tier == "f"},
            {c.chunk_id for c, tier in placed if tier == "s"},
            gpu=gpu,
        )
        best = found if best is None else min(best, found)
    return best


@st.composite
def workloads(
    draw: st.DrawFn, *, max_chunks: int = 7, one_chunk_moments: bool = False, plain: bool = False
) -> tuple[list[ChunkSpec], Trace]:
    """`plain`: a read takes the slot's bytes and nothing is pinned or a table."""
    num_chunks = draw(st.integers(1, max_chunks))
    chunks = []
    for i in range(num_chunks):
        num_pages = draw(st.integers(1, 6))
        if plain:
            chunks.append(chunk(i, num_pages))
            continue
        kind = draw(st.sampled_from(["", "", "", "", "pinned", "by_rows"]))
        read_nbytes = draw(st.sampled_from([num_pages * PAGE, num_pages * PAGE - 512, 512]))
        chunks.append(
            ChunkSpec(
                chunk_id=i,
                nbytes=num_pages * PAGE,
                read_nbytes=read_nbytes,
                pinned=kind == "pinned",
                by_rows=kind == "by_rows",
                row_read_nbytes=512,
            )
        )
    if one_chunk_moments:
        uses = [[i] for i in draw(st.permutations(range(num_chunks)))]
    else:
        ids = st.lists(st.integers(0, num_chunks - 1), min_size=1, max_size=3, unique=True)
        uses = draw(st.lists(ids, min_size=1, max_size=8))
    seconds = st.sampled_from([0.0, 0.5, 1.0, 3.0])
    return chunks, Trace("decode", tuple(Moment(f"m{n}", tuple(ids), draw(seconds)) for n, ids in enumerate(uses)))


@st.composite
def budgets_for(draw: st.DrawFn, chunks: list[ChunkSpec], *, gpu: bool) -> Budgets:
    total_pages = sum(c.nbytes for c in chunks) // PAGE
    pages = st.integers(0, total_pages + 1)
    return Budgets(draw(pages) * PAGE if gpu else None, draw(pages) * PAGE)


def links(*, gpu: bool, disk: float = PAGE, link: float = 2 * PAGE, **latencies: float) -> Links:
    """One page a second from disk, two over the gpu link, no latency."""
    return Links(disk, link if gpu else None, **latencies)
