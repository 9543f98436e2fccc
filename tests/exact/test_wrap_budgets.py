"""A wrapped model's bytes: per tier at every event, over every link, derived here from counts and nothing else."""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

import hetero
import hetero.wrapped
from hetero.io.errors import OutOfMemoryError
from hetero.memory.activations import Policy
from hetero.memory.ledger import Ledger, LedgerEvent
from hetero.memory.weights import Place
from hetero.planning import TooSmallError
from hetero.wrapped import WrappedRun

pytestmark = pytest.mark.usefixtures("no_leaks")

DEVICES = ("cpu", "emulated")
WIDTHS = (64, 96, 160, 50, 160, 160, 96, 128, 32)
BATCH = 48
BOUNCE_NBYTES = 2 << 20
WINDOW_NBYTES = 64 << 10
SMALL_NBYTES = 4096
PAGE = 4096
SHARES = (0.6, 0.3, 0.0)


class Net(nn.Module):
    """Linear layers of several sizes, a large buffer, and a norm that is small."""

    table: Tensor

    def __init__(self, activation: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(WIDTHS))
        self.norm = nn.LayerNorm(WIDTHS[-1])
        self.register_buffer("table", torch.randn(32, WIDTHS[0]))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.table[3]
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i + 1 < len(self.layers):
                x = x.relu()
        y: Tensor = self.norm(x)
        return y


def batch(seed: int = 0) -> Tensor:
    return torch.randn(BATCH, WIDTHS[0], generator=torch.Generator().manual_seed(seed))


def size_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def slot_of(parameter: Tensor) -> int:
    """Whole pages for the bytes at their address modulo 64."""
    return -(-(parameter.data_ptr() % 64 + size_of(parameter)) // PAGE) * PAGE


class Counts:
    """Bytes of a model, by what they are for."""

    def __init__(self, model: nn.Module) -> None:
        self.moving = {name: p for name, p in model.named_parameters() if size_of(p) >= SMALL_NBYTES}
        self.weights = sum(size_of(p) for p in self.moving.values())
        self.largest = max(slot_of(p) for p in self.moving.values())
        fixed = [p for p in model.parameters() if size_of(p) < SMALL_NBYTES]
        self.others = sum(map(size_of, [*fixed, *model.buffers()]))
        self.gradients = sum(size_of(p) for p in model.parameters() if p.requires_grad)
        # A linear layer keeps its input, which is what the ReLU before it keeps as well; the norm keeps its own input
        # and, below the size that counts, its statistics.
        self.activations = sum(BATCH * width * 4 for width in WIDTHS)

    def budgets(self, device: str, share: float, bounce_nbytes: int, *, training: bool = True) -> dict[str, int]:
        """A share of the weights, at least a ring for one layer, and all that is no weight."""
        fixed = self.others + (self.gradients + self.activations if training else 0)
        room = max(int(self.weights * share), self.largest)
        if device == "cpu":
            return {"cpu_memory": bounce_nbytes + fixed + room}
        # Behind the gpu tier RAM holds half of the weights, so that both links are busy.
        return {"gpu_memory": fixed + room, "cpu_memory": bounce_nbytes + self.weights // 2 + self.largest}


class Watch:
    """Every event of every ledger that a run makes: none above a limit, and the peaks since `restart`."""

    def __init__(self) -> None:
        self.num_events = 0
        self.peaks: dict[str, int] = {}

    def __call__(self, ledger: Ledger, event: LedgerEvent) -> None:
        self.num_events += 1
        assert 0 <= event.used_nbytes <= ledger.limit(event.tier), event
        assert event.used_nbytes == sum(ledger.holders(event.tier).values()), event
        self.peaks[event.tier] = max(self.peaks.get(event.tier, 0), event.used_nbytes)

    def restart(self) -> None:
        self.peaks.clear()


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Compute on one thread, give no heap back, and collect no garbage of torch's own after each test."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hetero.wrapping.trim_heap", lambda: None)
        yield
    gc.unfreeze()
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    watch = Watch()
    monkeypatch.setattr(hetero.wrapped, "Ledger", functools.partial(Ledger, observer=watch))
    yield watch
    assert watch.num_events > 0


def wrap(model: nn.Module, folder: Path, device: str, budgets: dict[str, int], **options: Any) -> WrappedRun:
    run: WrappedRun = hetero.wrap(model, device=device, disk=folder, **budgets, **options)
    return run


def step_of(model: nn.Module, seed: int, optimizer: torch.optim.Optimizer | None = None) -> list[Tensor]:
    """Output and gradients of one iteration."""
    model.zero_grad()
    output = model(batch(seed))
    output.square().sum().backward()
    found = [output.detach().clone()] + [p.grad.clone() for p in model.parameters() if p.grad is not None]
    if optimizer is not None:
        optimizer.step()
    return found


def plain_steps(num_steps: int) -> list[list[Tensor]]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return [step_of(model, i, optimizer) for i in range(num_steps)]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


# -- bytes per tier ----------------------------------------------------------------------------------------------------


def check_tiers(run: WrappedRun, counts: Counts, *, gradients: int, activations: int) -> None:
    """Every holder has exactly what the model's counts say, and the weights are where their chunks are said to be."""
    first = run.streaming.first
    place_of = {id(view.parameter): chunk.place for chunk in run.streaming.chunks for view in chunk.views}
    at = {place: sum(size_of(p) for p in counts.moving.values() if place_of[id(p)] is place) for place in Place}
    assert sum(at.values()) == counts.weights
    uses = run.stats().tiers
    rest = {"buffers and small weights": counts.others, "gradients": gradients, "activations": activations}
    expected: dict[str, dict[str, int]] = {"cpu": {"i/o bounce buffers": BOUNCE_NBYTES, "ring": 0}, "gpu": {"ring": 0}}
    expected[first].update(rest, weights=at[Place.FIRST])
    if first == "gpu":
        expected["cpu"]["weights"] = at[Place.CPU]
    for tier in ("cpu", "gpu")[: len(expected) if first == "gpu" else 1]:
        held = dict(uses[tier].holders)
        ring = held.pop("ring", 0)
        assert held == {name: n for name, n in expected[tier].items() if n}, tier
        assert uses[tier].used_nbytes == sum(held.values()) + ring <= uses[tier].limit_nbytes
    if run.plan.num_streamed:
        ring = uses[first].holders["ring"]
        streamed = [slot_of(p) for p in counts.moving.values() if place_of[id(p)] is not Place.FIRST]
        assert ring % PAGE == 0 and ring >= max(streamed)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("device", DEVICES)
def test_every_tier_holds_what_the_counts_say_after_forward_backward_and_step(
    tmp_path: Path, watch: Watch, device: str, share: float
) -> None:
    expected = plain_steps(5)
    model = Net()
    counts = Counts(model)
    with wrap(model, tmp_path, device, counts.budgets(device, share, BOUNCE_NBYTES)) as run:
        check_tiers(run, counts, gradients=0, activations=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        for i in range(5):
            model.zero_grad()
            watch.restart()
            output = model(batch(i))
            check_tiers(run, counts, gradients=counts.gradients, activations=counts.activations)
            output.square().sum().backward()
            check_tiers(run, counts, gradients=counts.gradients, activations=0)
            found = [output.detach()] + [p.grad for p in model.parameters() if p.grad is not None]
            assert same(found, expected[i])
            optimizer.step()
            check_tiers(run, counts, gradients=counts.gradients, activations=0)
        assert run.plan.state == "planned" and run.plan.num_streamed > 0
        assert run.plan.activations_nbytes == counts.activations
        # The last, steady iteration: what is there all along, and every activation.
        steady = run.stats().tiers[run.streaming.first].used_nbytes
        assert watch.peaks[run.streaming.first] == steady + counts.activations
        assert run.stats().executor["num_leases"] > 5 * run.plan.num_streamed


@pytest.mark.parametrize("device", DEVICES)
def test_what_fits_is_where_it_is_computed_on_and_nothing_is_held_for_streaming(tmp_path: Path, device: str) -> None:
    model = Net()
    counts = Counts(model)
    budgets = counts.budgets(device, 1.0, BOUNCE_NBYTES)
    slack = sum(slot_of(p) for p in counts.moving.values()) - counts.weights
    budgets = {name: nbytes + counts.largest + slack for name, nbytes in budgets.items()}
    if device == "emulated":
        budgets["cpu_memory"] += counts.weights
    with wrap(model, tmp_path, device, budgets) as run:
        for i in range(3):
            step_of(model, i)
        assert run.plan.num_streamed == 0
        check_tiers(run, counts, gradients=counts.gradients, activations=0)
        assert all("ring" not in use.holders for use in run.stats().tiers.values())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("has_disk", [True, False], ids=["disk", "no disk"])
def test_the_smallest_budgets_that_an_error_names_work_for_a_forward_and_one_byte_less_does_not(
    tmp_path: Path, device: str, has_disk: bool
) -> None:
    disk = tmp_path if has_disk else None
    model = Net()
    expected = Net()(batch()).detach()
    tiny = {"cpu_memory": PAGE} | ({"gpu_memory": PAGE} if device == "emulated" else {})
    with pytest.raises(TooSmallError) as caught:
        hetero.wrap(model, device=device, disk=disk, **tiny)
    needs = {f"{tier}_memory": nbytes for tier, nbytes in caught.value.needs.items()}
    assert all(f"{name}={nbytes}" in str(caught.value) for name, nbytes in needs.items())
    for name in needs:
        with pytest.raises(TooSmallError) as again:
            hetero.wrap(model, device=device, disk=disk, **(needs | {name: needs[name] - 1}))
        assert {f"{tier}_memory": nbytes for tier, nbytes in again.value.needs.items()} == needs
    for _ in range(2):
        with hetero.wrap(model, device=device, disk=disk, **needs) as run, torch.no_grad():
            for _ in range(3):
                assert torch.equal(model(batch()), expected)
            streams = device == "emulated" or has_disk
            assert (run.plan.num_streamed > 0) is streams and run.stats().num_unleased == 0
            assert (run.stats().executor["num_leases"] > 0) is streams


@pytest.mark.parametrize("device", DEVICES)
def test_every_budget_from_the_smallest_to_more_than_enough_works(tmp_path: Path, device: str) -> None:
    model = Net()
    counts = Counts(model)
    expected = Net()(batch()).detach()
    smallest = counts.budgets(device, 0.0, BOUNCE_NBYTES, training=False)
    if device == "emulated":
        smallest["cpu_memory"] = BOUNCE_NBYTES + counts.largest
    num_streamed = set()
    for name in smallest:
        total = counts.weights + 3 * counts.largest
        for extra in [*range(0, total, total // 12), counts.weights - counts.largest, counts.weights]:
            budgets = smallest | {name: smallest[name] + extra}
            with wrap(model, tmp_path, device, budgets) as run, torch.no_grad():
                for _ in range(2):
                    assert torch.equal(model(batch()), expected), (name, extra)
                num_streamed.add(run.plan.num_streamed)
                assert run.stats().num_unleased == 0, (name, extra)
    assert len(num_streamed) > 3


@pytest.mark.parametrize("device", DEVICES)
def test_training_that_cannot_fit_says_what_is_missing_and_training_goes_on_with_that_much_more(
    tmp_path: Path, device: str
) -> None:
    expected = plain_steps(2)
    model = Net()
    counts = Counts(model)
    budgets = counts.budgets(device, 0.0, BOUNCE_NBYTES, training=False)
    for _ in range(30):
        try:
            with wrap(model, tmp_path, device, budgets, activations="keep") as run:
                optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
                for i in range(2):
                    assert same(step_of(model, i, optimizer), expected[i])
                assert run.plan.num_streamed > 0
            break
        except OutOfMemoryError as error:
            assert f"{error.tier}_memory" in str(error)
            budgets[f"{error.tier}_memory"] += error.requested_nbytes - error.free_nbytes
            model = Net()
    else:
        pytest.fail(f"still too small: {budgets}")
    least = counts.others + counts.gradients + counts.activations
    first = "gpu_memory" if device == "emulated" else "cpu_memory"
    fixed = least + (BOUNCE_NBYTES if device == "cpu" else 0)
    assert fixed < budgets[first] <= fixed + 2 * counts.largest + PAGE


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", ["auto", "disk"])
def test_a_batch_of_a_large_data_set_is_the_users_memory_and_stays(tmp_path: Path, device: str, policy: Policy) -> None:
    data = torch.randn(100 * BATCH, WIDTHS[0], generator=torch.Generator().manual_seed(1))

    def found(model: nn.Module, i: int) -> list[Tensor]:
        model.zero_grad()
        output = model(data[i * BATCH : (i + 1) * BATCH])
        output.square().sum().backward()
        return [output.detach().clone()] + [p.grad.clone() for p in model.parameters() if p.grad is not None]

    model, plain = Net(), Net()
    model.table.zero_()
    plain.table.zero_()
    for each in (model, plain):
        each.forward = functools.partial(forward_of_the_batch_itself, each)  # type: ignore[method-assign]
    counts = Counts(model)
    with wrap(model, tmp_path, device, counts.budgets(device, 0.3, BOUNCE_NBYTES), activations=policy) as run:
        for i in range(4):
            assert same(found(model, i), found(plain, i))
        assert run.plan.num_streamed > 0
        assert run.plan.activations_nbytes <= counts.activations - BATCH * WIDTHS[0] * 4 < data.nbytes


def forward_of_the_batch_itself(model: Net, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x).relu()
    y: Tensor = model.norm(x)
    return y


# -- traffic -----------------------------------------------------------------------------------------------------------


class Traffic:
    """Bytes over each link since the last look."""

    def __init__(self, run: WrappedRun) -> None:
        self.run = run
        self.seen = (0, 0, 0)
        self.look()

    def look(self) -> dict[str, int]:
        stats = self.run.stats()
        now = stats.disk_read_nbytes, stats.gpu_link_nbytes, stats.disk_written_nbytes
        seen, self.seen = self.seen, now
        return dict(zip(("disk", "gpu link", "written"), (b - a for a, b in zip(seen, now, strict=True)), strict=True))


def formula(run: WrappedRun, counts: Counts, *, backward: bool) -> dict[str, int]:
    """A forward uses every layer once, and so does backward, but for the first: nobody wants its input's gradient."""
    place_of = {id(view.parameter): chunk.place for chunk in run.streaming.chunks for view in chunk.views}
    disk = link = 0
    for name, parameter in counts.moving.items():
        num_uses = 1 + (backward and name != "layers.0.weight")
        place = place_of[id(parameter)]
        if place is Place.DISK:
            disk += num_uses * slot_of(parameter)
        if run.streaming.first == "gpu" and place is not Place.FIRST:
            lines = -(-(parameter.data_ptr() % 64 + size_of(parameter)) // 64) * 64
            link += num_uses * (slot_of(parameter) if place is Place.DISK else lines)
    return {"disk": disk, "gpu link": link, "written": 0}


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backward", [True, False], ids=["training", "forward"])
def test_a_planned_iteration_moves_exactly_the_plans_bytes(
    tmp_path: Path, device: str, share: float, backward: bool
) -> None:
    model = Net()
    counts = Counts(model)
    budgets = counts.budgets(device, share, BOUNCE_NBYTES, training=backward)
    with wrap(model, tmp_path, device, budgets) as run, torch.set_grad_enabled(backward):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for i in range(6):
            traffic = Traffic(run)
            if backward:
                step_of(model, i, optimizer)
            else:
                model(batch(i))
            moved = traffic.look()
            if i < 2:  # the warm-up, and the iteration that carries the plan out
                continue
            assert run.plan.state == "planned" and run.num_plans == 1
            assert moved == formula(run, counts, backward=backward), i
            assert moved["disk"] == run.plan.disk_nbytes and moved["gpu link"] == run.plan.gpu_link_nbytes
        assert run.plan.num_streamed > 0 and run.stats().num_unleased == 0
        assert run.plan.disk_nbytes > 0 or device == "emulated"
        assert run.plan.gpu_link_nbytes > 0 or device == "cpu"


def scratch_mappings() -> list[dict[str, int]]:
    """What the kernel says of the mapped scratch file: bytes present, and bytes that differ from the disk."""
    found: list[dict[str, int]] = []
    is_ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(":")
        if "-" in line.split(" ", 1)[0]:
            is_ours = "scratch.bin" in line
            if is_ours:
                found.append({})
        elif is_ours and rest.strip().endswith("kB"):
            found[-1][name] = int(rest.split()[0]) * 1024
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_frozen_weights_are_neither_written_nor_touched_at_home(tmp_path: Path, device: str) -> None:
    model = Net()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in ("layers.0.bias", "norm.weight"))
    counts = Counts(model)
    with wrap(model, tmp_path, device, counts.budgets(device, 0.0, BOUNCE_NBYTES)) as run:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        for i in range(2):
            step_of(model, i, optimizer)
        traffic = Traffic(run)
        before = run.stats().executor["num_leases"]
        for i in range(3):
            step_of(model, i, optimizer)
        assert run.plan.num_streamed > 0 and traffic.look()["written"] == 0
        assert run.stats().executor["num_leases"] - before == 3 * len(uses_of_streamed(run, counts))
        assert run.stats().num_unleased == 0
        (mapping,) = scratch_mappings()
        assert mapping["Size"] >= counts.weights and mapping["Rss"] == 0


def uses_of_streamed(run: WrappedRun, counts: Counts) -> list[str]:
    """The layers that an iteration leases: in forward, and in backward but for the first one."""
    place_of = {id(view.parameter): chunk.place for chunk in run.streaming.chunks for view in chunk.views}
    streamed = [name for name, p in counts.moving.items() if place_of[id(p)] is not Place.FIRST]
    return streamed + [name for name in streamed if name != "layers.0.weight"]


def test_clean_weights_are_not_written_by_passes_and_an_optimizer_writes_what_it_steps(tmp_path: Path) -> None:
    model = Net()
    counts = Counts(model)
    with wrap(model, tmp_path, "cpu", counts.budgets("cpu", 0.0, BOUNCE_NBYTES)) as run:
        for i in range(4):
            step_of(model, i)
        (mapping,) = scratch_mappings()
        assert mapping["Rss"] == 0, "passes use copies"
        stepped = model.get_parameter("layers.4.weight")
        (chunk,) = (c for c in run.streaming.chunks if c.views[0].parameter is stepped)
        assert chunk.place is Place.DISK
        torch.optim.SGD([stepped], lr=1e-3).step()
        (mapping,) = scratch_mappings()
        assert slot_of(stepped) == mapping["Shared_Dirty"] + mapping["Private_Dirty"]
        assert run.stats().num_unleased == 0


# -- nothing to do -----------------------------------------------------------------------------------------------------


def global_hooks() -> int:
    return sum(
        len(found) for name, found in vars(torch_module).items() if name.startswith("_global_") and "hooks" in name
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backward", [True, False], ids=["training", "forward"])
def test_nothing_of_ours_is_active_once_everything_fits(tmp_path: Path, device: str, backward: bool) -> None:
    expected = plain_steps(3)
    model = Net()
    counts = Counts(model)
    before = global_hooks()
    budgets: dict[str, Any] = {"cpu_memory": "1GiB"} | ({"gpu_memory": "64MiB"} if device == "emulated" else {})
    with wrap(model, tmp_path, device, budgets) as run:
        assert global_hooks() > before, "the first iteration is watched"
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        seen: list[Any] = []

        def look(*_: Any) -> None:
            seen.append((global_hooks() - before, torch._C._autograd._top_saved_tensors_default_hooks(True)))

        handle = model.layers[3].register_forward_hook(look)
        for i in range(3):
            if backward:
                assert same(step_of(model, i, optimizer), expected[i])
            else:
                with torch.no_grad():
                    model(batch(i))
        handle.remove()
        assert seen[0] != (0, None) and seen[2] == (0, None)
        assert run.plan.num_streamed == 0 and run.plan.state == "planned"
        assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules() if m is not model)
        assert not model._forward_hooks and len(model._forward_pre_hooks) == (0 if backward else 1)
        check_tiers(run, counts, gradients=counts.gradients if backward else 0, activations=0)
    assert global_hooks() == before and not model._forward_pre_hooks


# -- activations -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_tight", [False, True], ids=["roomy", "tight"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", ["keep", "cpu", "disk", "auto"])
def test_every_policy_is_exact_and_moves_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: Policy, device: str, is_tight: bool
) -> None:
    monkeypatch.setattr("hetero.memory.activations.LARGE_NBYTES", 16 << 10)
    monkeypatch.setattr("hetero.memory.activations.WINDOW_NBYTES", WINDOW_NBYTES)
    large = sum(BATCH * width * 4 for width in WIDTHS if BATCH * width * 4 >= 16 << 10)
    expected = plain_steps(5)
    model = Net()
    counts = Counts(model)
    budgets = counts.budgets(device, 0.3, BOUNCE_NBYTES)
    first = "gpu_memory" if device == "emulated" else "cpu_memory"
    if is_tight:
        budgets[first] = budgets[first] - int(counts.weights * 0.3) + counts.largest - counts.activations // 2
    with wrap(model, tmp_path, device, budgets, activations=policy) as run:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        if is_tight and policy == "keep":
            with pytest.raises(OutOfMemoryError, match="activations"):
                step_of(model, 0, optimizer)
            return
        for i in range(5):
            assert same(step_of(model, i, optimizer), expected[i]), i
        stats = run.stats()
        assert run.plan.num_streamed > 0 and stats.executor["num_leases"] > 0
        # What had not left yet when it was asked for has not come back either.
        assert 0 <= stats.activations_out_nbytes - stats.activations_back_nbytes <= 5 * WINDOW_NBYTES
        leaves_at_once = policy == "disk" or (policy == "cpu" and device == "emulated")
        if leaves_at_once:
            assert stats.activations_out_nbytes >= 5 * large and stats.activations_back_nbytes > 0
        else:
            assert (stats.activations_out_nbytes > 0) is is_tight
        check_tiers(run, counts, gradients=counts.gradients, activations=0)
