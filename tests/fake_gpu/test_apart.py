"""Weights at home in RAM, compute on a GPU: what has to be right although the two are apart."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint

import hetero
from hetero.copies import COPIES
from hetero.memory import trace
from hetero.memory.gradients import GRADIENTS
from hetero.wrapped import WrappedRun
from tests.exact.feature_rig import WIDTH, backward, batch, tower
from tests.exact.test_wrap_hidden_writes import decay, writing
from tests.fake_gpu.clock import Clock
from tests.fake_gpu.device import DEVICE

NUM_STEPS, NUM_CLOCKS = 4, 4


def wrapped(model: nn.Module, share: float, folder: Path, extra_nbytes: int = 100 << 10) -> WrappedRun:
    """Room for a share of the weights on the GPU, and for all else in RAM."""
    weights = sum(p.nbytes for p in model.parameters())
    run: WrappedRun = hetero.wrap(
        model,
        device="emulated",
        gpu_memory=int(weights * share) + extra_nbytes,
        cpu_memory=(2 << 20) + 4 * weights,
        disk=folder,
    )
    return run


def on_device(step: int) -> Tensor:
    return batch(step)[0].to(DEVICE)


def check(
    make: Callable[[], Any], session: Callable[[Any], list[Tensor]], share: float, folder: Path, **more: Any
) -> None:
    """The session on the device as a whole, and wrapped: equal, with weights that streamed."""
    expected = session(make().to(DEVICE))
    model = make()
    with wrapped(model, share, folder, **more) as run:
        found = session(model)
        assert run.plan.num_streamed > 0
    assert len(found) == len(expected)
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(found, expected, strict=True))


def forwards(model: Any) -> list[Tensor]:
    """Without gradients; weights change between them."""
    seen = []
    with torch.no_grad():
        for step in range(NUM_STEPS):
            seen.append(model(on_device(step)).cpu())
            for parameter in model.parameters():
                parameter.data.mul_(0.9)
    return seen


def test_what_a_forward_writes_through_data_comes_home(tmp_path: Path, no_leaks: None) -> None:
    def session(model: Any) -> list[Tensor]:
        with torch.no_grad():
            return [model(on_device(step)).cpu() for step in range(NUM_STEPS)]

    check(lambda: writing(decay), session, 0.3, tmp_path, extra_nbytes=40 << 10)


class Cached(nn.Module):
    """Two weights that the ring holds one by one only, and a view of one that is made once."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.kept: Any = None

    def forward(self, x: Tensor) -> Any:
        if self.kept is None:
            self.kept = self.weight.t()
        return self.last(x @ self.kept)


def cached() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(Cached() for _ in range(4)))


@pytest.mark.parametrize("share", [0.3, 0.5, 0.6, 0.7])
def test_a_view_that_a_module_keeps_is_the_weight(share: float, tmp_path: Path, no_leaks: None) -> None:
    check(cached, forwards, share, tmp_path, extra_nbytes=64 << 10)


def test_a_view_of_a_copy_is_the_weight_when_all_weights_have_a_place(tmp_path: Path, no_leaks: None) -> None:
    """The room is there at the first plan; in the warm-up there was no slot."""
    expected = forwards(cached().to(DEVICE))
    model = cached()
    with torch.no_grad(), wrapped(model, 2.5, tmp_path) as run:
        vars(run.streaming)["_acquire"] = lambda executor, ids: None
        model(on_device(0))
        del vars(run.streaming)["_acquire"]
        found = forwards(model)
        assert run.plan.num_streamed == 0 and run.streaming._copies.has_any
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_copy_that_nobody_looks_at_is_free_after_the_pass(tmp_path: Path, no_leaks: None) -> None:
    model = cached()
    with torch.no_grad(), wrapped(model, 0.5, tmp_path, extra_nbytes=64 << 10) as run:
        copy = run.streaming._copies.make(next(c for c in run.streaming.streamed))
        assert run.ledger.held("gpu", COPIES) > 0
        del copy
        model(on_device(0))
        for module in model:
            module.kept = None
        model(on_device(1))
        for module in model:
            module.kept = None
        run.streaming.restart(())
        assert run.ledger.held("gpu", COPIES) == 0


def test_gradients_of_homes_and_of_slots_add_up_in_torchs_order(tmp_path: Path, no_leaks: None) -> None:
    def session(model: Any) -> list[Tensor]:
        seen = []
        for step in range(3):
            loss = model(on_device(step)).square().mean()
            for parameter in model.parameters():
                loss = loss + 0.01 * parameter.square().sum().to(DEVICE)
            backward(loss)
            seen += [parameter.grad.detach().cpu().clone() for parameter in model.parameters()]
        return seen

    check(tower, session, 1.4, tmp_path, extra_nbytes=200 << 10)


def test_states_of_any_shape_follow_their_weights(tmp_path: Path, no_leaks: None) -> None:
    def session(model: Any) -> list[Tensor]:
        optimizer: torch.optim.Optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2, foreach=False)
        seen = []
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            loss = model(on_device(step)).square().mean()
            backward(loss)
            optimizer.step()
            seen += [loss.detach().cpu(), *(p.detach().cpu().clone() for p in model.parameters())]
        return seen

    check(tower, session, 1.4, tmp_path, extra_nbytes=200 << 10)


class Sloping(nn.Module):
    """A forward that runs a backward, through a checkpoint."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Any:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            energy: Any = checkpoint(self.first, y, use_reentrant=self.use_reentrant)
            if self.use_reentrant:
                energy.square().sum().backward()
                slope = y.grad
            else:
                (slope,) = torch.autograd.grad(energy.square().sum(), y)
        assert slope is not None
        return self.second(x + slope.detach())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_forward_runs_a_backward_through_a_checkpoint(
    use_reentrant: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(*(Sloping(use_reentrant) for _ in range(3)))

    def session(model: Any) -> list[Tensor]:
        with torch.no_grad():
            return [model(on_device(step)).cpu() for step in range(NUM_STEPS)]

    for seed in range(NUM_CLOCKS):  # so that now this one streams, now that one
        monkeypatch.setattr(trace, "perf_counter", Clock(seed))
        check(make, session, 0.4, tmp_path, extra_nbytes=40 << 10)


def test_after_an_interrupt_the_state_is_at_home(tmp_path: Path, no_leaks: None) -> None:
    model = tower()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with torch.no_grad(), wrapped(model, 0.4, tmp_path, extra_nbytes=40 << 10) as run:
        expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for step in range(3):
            model(on_device(step))
        handle = model.blocks[3].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(on_device(0))
        handle.remove()
        held = run.ledger.used("gpu")
        state = model.state_dict()
        assert run.ledger.used("gpu") == held
        assert all(torch.equal(state[name].cpu(), expected[name].cpu()) for name in expected)
        del state
        with pytest.raises(KeyboardInterrupt):
            handle = model.blocks[3].register_forward_hook(interrupt)
            model(on_device(0))
        handle.remove()
    assert {p.device.type for p in model.parameters()} == {"cpu"}, "the close ended the lease"


def test_the_time_of_a_module_is_recorded_as_its_own(tmp_path: Path, no_leaks: None) -> None:
    model = tower()
    plain = model.blocks[0].up.forward

    def slow(x: Tensor) -> Any:
        y = plain(x)
        time.sleep(0.05)
        return y

    model.blocks[0].up.forward = slow
    with torch.no_grad(), wrapped(model, 0.5, tmp_path) as run:
        for step in range(2):
            model(on_device(step))
        trace = run.recorder.trace("forward")
        assert trace is not None
        assert max(moment.compute_s for moment in trace.moments) >= 0.04


def test_a_close_that_fails_leaves_no_hook_and_nothing_on_the_device(tmp_path: Path) -> None:
    model = tower()
    run = wrapped(model, 1.5, tmp_path, extra_nbytes=600 << 10)
    backward(model(on_device(0)).square().mean())

    def fail(chunk: Any) -> None:
        raise RuntimeError("no")

    vars(run.streaming.homes)["_restore"] = fail
    with pytest.raises(RuntimeError, match="no"):
        run.close()
    assert not _global_optimizer_pre_hooks
    small = [p for p in model.parameters() if p.nbytes < 4096]
    assert small and all(p.device.type == "cpu" for p in small)


class Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise RuntimeError("refused")


def test_a_run_closes_right_after_a_backward_that_raised(tmp_path: Path, no_leaks: None) -> None:
    """Its caller hears of it before torch's thread has let go."""
    for _ in range(5):
        model = tower()
        with wrapped(model, 1.4, tmp_path, extra_nbytes=200 << 10):
            loss = model(Refusing.apply(model(on_device(0)))).square().mean()  # type: ignore[no-untyped-call]
            with pytest.raises(RuntimeError, match="refused"):
                backward(loss)
            del loss


def test_gradients_of_weights_that_left_in_a_forward_are_booked_where_they_come_home(
    tmp_path: Path, no_leaks: None
) -> None:
    model = tower()
    weights = sum(p.nbytes for p in model.parameters())
    with hetero.wrap(
        model,
        device="emulated",
        gpu_memory=weights * 7 // 4 + (128 << 10),
        cpu_memory=(2 << 20) + 4 * weights,
        disk=tmp_path,
    ) as run:
        num_streamed = []
        for num_rows in (8, 8, 256, 256, 8):  # activations of many rows send weights away
            model.zero_grad()
            backward(model(batch(0, num_rows)[0].to(DEVICE)).square().mean())
            away = [view.parameter for chunk in run.streaming.streamed for view in chunk.views]
            at_home = sum(p.grad.nbytes for p in away if p.grad is not None)
            assert all(p.grad is not None and p.grad.device.type == "cpu" for p in away)
            assert run.ledger.held("cpu", GRADIENTS) == at_home
            num_streamed.append(len(away))
        assert 0 < num_streamed[1] < num_streamed[2]


def test_torchs_own_thread_is_known_also_when_python_has_a_name_for_it(tmp_path: Path, no_leaks: None) -> None:
    """Whoever logs, or asks for the current thread, makes it a thread of Python's for good."""

    def make() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(*(Sloping(use_reentrant=True) for _ in range(3)))

    def session(model: Any) -> list[Tensor]:
        seen = []
        for step in range(NUM_STEPS):
            x = on_device(step).requires_grad_()
            y = model(x)
            y.register_hook(lambda gradient: threading.current_thread() and None)
            backward(y.square().mean())
            with torch.no_grad():
                seen += [x.grad, model(on_device(step))]
        return seen

    check(make, session, 0.4, tmp_path)


class Raises(torch.autograd.Function):
    """Its backward does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ZeroDivisionError("in a backward")


@pytest.mark.parametrize("drops", [True, False], ids=["dropped", "kept"])
def test_what_a_backward_that_raises_has_made_is_the_users_to_keep_or_drop(
    drops: bool, tmp_path: Path, no_leaks: None
) -> None:
    def session(model: Any) -> list[Tensor]:
        seen: list[Tensor] = []
        for step in range(NUM_STEPS):
            backward(model(on_device(step)).square().mean())
            with pytest.raises(ZeroDivisionError):
                raising: Any = Raises.apply(on_device(9).requires_grad_())  # type: ignore[no-untyped-call]
                backward(model(raising).square().mean())
            if drops:
                model.zero_grad()
            backward(model(on_device(step)).square().mean())
            seen += [p.grad.clone() for p in model.parameters()]
        return seen

    check(tower, session, 1.6, tmp_path)


class Twice(nn.Module):
    """Calls a layer twice, each time to be computed again, which stops as soon as the last saved tensor is there."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.layer, checkpoint(self.layer, x, use_reentrant=False), use_reentrant=False)


@pytest.mark.parametrize("share", [1.2, 2.1])
def test_a_recomputation_that_stops_early_ends_its_lease(share: float, tmp_path: Path, no_leaks: None) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(*(Twice() for _ in range(4)))

    def session(model: Any) -> list[Tensor]:
        seen: list[Tensor] = []
        for step in range(NUM_STEPS):
            backward(model(on_device(step).requires_grad_()).square().mean())
            seen += [p.grad.clone() for p in model.parameters()]
        return seen

    model = make()
    with wrapped(model, share, tmp_path) as run:
        session(model)
        assert not [chunk.name for chunk in run.streaming.chunks if chunk.num_open]
    expected, again = session(make().to(DEVICE)), make()
    with wrapped(again, share, tmp_path):
        assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(session(again), expected, strict=True))
