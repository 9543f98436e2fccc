"""Hooks of others, errors, interrupts, threads, and graphs that live longer than they should."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional

import hetero
from hetero.wrapped import WrappedRun
from tests.exact.feature_rig import (
    DEVICES,
    WIDTH,
    Block,
    Tower,
    assert_same,
    assert_streamed,
    backward,
    batch,
    check,
    gradients,
    loss_of,
    tight,
    tight_budgets,
    tower,
    train,
)

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.parametrize("device", DEVICES)]


def active_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


# -- saved-tensor hooks of others --------------------------------------------------------------------------------------


class Rounding(saved_tensors_hooks):
    """Keeps everything in bfloat16: gradients show whether these hooks were asked."""

    def __init__(self) -> None:
        self.num_packed = self.num_unpacked = 0

        def pack(tensor: Tensor) -> Tensor:
            self.num_packed += 1
            return tensor.detach().bfloat16() if tensor.is_floating_point() else tensor.detach()

        def unpack(packed: Tensor) -> Tensor:
            self.num_unpacked += 1
            return packed.float() if packed.is_floating_point() else packed

        super().__init__(pack, unpack)


class Offloading(saved_tensors_hooks):
    """As trl's activation offloading: large tensors leave, each storage once, parameters stay."""

    def __init__(self, model: nn.Module) -> None:
        self.held: dict[int, tuple[Tensor, bool]] = {}
        self.parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.num_offloaded = 0

        def pack(tensor: Tensor) -> int:
            is_parameter = tensor.untyped_storage().data_ptr() in self.parameters or isinstance(tensor, nn.Parameter)
            leaves = tensor.numel() * tensor.element_size() >= 1024 and not is_parameter
            self.num_offloaded += leaves
            number = len(self.held)
            self.held[number] = (tensor.clone() if leaves else tensor, leaves)
            return number

        def unpack(number: int) -> Tensor:
            tensor, leaves = self.held.pop(number)
            return tensor.clone() if leaves else tensor

        super().__init__(pack, unpack)


HOOKS: dict[str, Callable[[Any], AbstractContextManager[Any]]] = {
    "rounding": lambda model: Rounding(),
    "save-on-cpu": lambda model: save_on_cpu(),
    "offloading": Offloading,
    "identity": lambda model: saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
}


@pytest.mark.parametrize(
    ("name", "is_backward_inside"), [*((name, False) for name in HOOKS), ("rounding", True), ("offloading", True)]
)
def test_hooks_around_the_forward_see_what_they_see_plainly(
    device: str, name: str, is_backward_inside: bool, tmp_path: Path
) -> None:
    def session(model: Any) -> list[Any]:
        seen: list[Any] = []
        for seed in range(3):
            hooks = HOOKS[name](model)
            model.zero_grad()
            with hooks:
                loss = loss_of(model, seed)
                if is_backward_inside:
                    backward(loss)
            if not is_backward_inside:
                backward(loss)
            seen += [loss.detach(), gradients(model)]
            seen += [getattr(hooks, name, 0) for name in ("num_packed", "num_unpacked")]
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
        assert active_hooks() is None
        return seen

    check(tower(), session, device, tmp_path)


class HookedTower(Tower):
    """Every second block saves its tensors under hooks of the user's."""

    name = ""

    def forward(self, x: Any) -> Any:
        for i, block in enumerate(self.blocks):
            with HOOKS[self.name](self) if i % 2 else nullcontext():
                x = block(x)
        return self.head(x)


@pytest.mark.parametrize("name", list(HOOKS))
def test_hooks_inside_the_forward_see_what_they_see_plainly(device: str, name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = HookedTower()
    model.name = name
    check(model, train, device, tmp_path, activations="disk")


class LeavingOpen(Tower):
    """Enters hooks in its forward that are left later, by somebody else."""

    hooks: Any = None

    def forward(self, x: Any) -> Any:
        x = self.blocks[0](x)
        self.hooks = Rounding()
        self.hooks.__enter__()
        for block in self.blocks[1:]:
            x = block(x)
        return self.head(x)


def test_hooks_that_a_forward_leaves_open_stay_open(device: str, tmp_path: Path) -> None:
    def session(model: Any) -> list[Any]:
        seen: list[Any] = []
        for seed in range(3):
            x, y = batch(seed)
            out = model(x)
            loss = (out.exp().tanh() - y).square().mean()
            hooks, model.hooks = model.hooks, None
            hooks.__exit__()
            assert active_hooks() is None
            after = (out * out.sigmoid()).mean()
            model.zero_grad()
            backward(loss + after)
            seen += [loss.detach(), gradients(model), hooks.num_packed, hooks.num_unpacked]
        return seen

    torch.manual_seed(0)
    check(LeavingOpen(), session, device, tmp_path)


def test_disabled_hooks_are_respected(device: str, tmp_path: Path) -> None:
    def session(model: Any) -> list[Any]:
        train(model, 2)
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            return train(model, 2)

    check(tower(), session, device, tmp_path)


# -- without gradients -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_a_forward_without_gradients_is_followed_by_training(device: str, mode: str, tmp_path: Path) -> None:
    def session(model: Any) -> list[Any]:
        seen: list[Any] = []
        for seed in range(3):
            with getattr(torch, mode)():
                seen.append(model(batch(seed)[0]).clone())
            seen.append(train(model, 1))
            with getattr(torch, mode)():
                with torch.no_grad():
                    for p in model.parameters():
                        p.mul_(0.99)
                seen.append(model(batch(seed)[0]).clone())
        return [seen, train(model)]

    check(tower(), session, device, tmp_path)


def test_an_inference_tensor_is_refused_as_plainly(device: str, tmp_path: Path) -> None:
    model = tower()
    with tight(model, device, tmp_path) as run:
        train(model, 2)
        with torch.inference_mode():
            x = batch(0)[0].clone()
        plain = deepcopy(model)
        for each in (plain, model):
            with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
                each(x)
        assert_same(train(model), train(plain))
        assert_streamed(run)


def sizes_of(run: WrappedRun) -> dict[str, int]:
    """Everything of a run that could grow."""
    run.activations.collect()
    containers = {
        "memories": run.activations._memories,
        "keys": run.activations._by_key,
        "dropped": run.activations.dropped,
        "leaving": run.activations._leaving,
        "slot owners": run.streaming._slot_owners,
        "hooks": run._on_stacks,
        "in backward": run._in_backward,
        "modules": run._hooks._stack,
    }
    used = {f"{tier} {holder}": n for tier, use in run.stats().tiers.items() for holder, n in use.holders.items()}
    return {name: len(container) for name, container in containers.items()} | used


def num_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(value), Tensor) for value in gc.get_objects())


@pytest.mark.parametrize("num_passes", [80, pytest.param(1000, marks=pytest.mark.slow)])
def test_evaluation_with_gradients_on_keeps_nothing(device: str, num_passes: int, tmp_path: Path) -> None:
    model = tower()
    with tight(model, device, tmp_path) as run:
        train(model, 3)

        def evaluate(num_passes: int) -> tuple[int, int, dict[str, int]]:
            for seed in range(num_passes):
                loss_of(model, seed)
            gc.collect()
            objects = gc.get_objects()
            return sum(issubclass(type(value), Tensor) for value in objects), len(objects), sizes_of(run)

        evaluate(20)
        tensors, objects, sizes = evaluate(20)
        tensors_after, objects_after, sizes_after = evaluate(num_passes)
        assert tensors_after <= tensors
        # Spans that are kept for a timeline grow until their deque is full: a few tuples per module.
        assert objects_after - objects < num_passes * 60
        assert sizes_after == sizes
        assert sizes["memories"] == 0
        assert_streamed(run)


def test_saved_activations_die_with_their_graph(device: str, tmp_path: Path) -> None:
    class Remembering(Tower):
        seen: Any = ()

        def forward(self, x: Any) -> Any:
            x = self.blocks[0](x).exp()
            self.seen = weakref.ref(x.untyped_storage())
            return self.head(x)

    torch.manual_seed(0)
    model = Remembering()
    with tight(model, device, tmp_path) as run:
        loss = loss_of(model, 0)
        backward(loss)
        assert_streamed(run)
        del loss
        holders = run.stats().tiers["gpu" if device == "emulated" else "cpu"].holders
        assert holders.get("activations", 0) == 0


# -- errors and interrupts ---------------------------------------------------------------------------------------------


class FailingLinear(nn.Linear):
    """Raises `error`, once, when its output is there."""

    error: BaseException | None = None

    def forward(self, x: Any) -> Any:
        x = super().forward(x)
        error, self.error = self.error, None
        if error is not None:
            raise error
        return x


class FailingBlock(Block):
    """Raises `error`, once, before it computes anything."""

    error: BaseException | None = None

    def __init__(self) -> None:
        super().__init__()
        self.up = FailingLinear(WIDTH, 2 * WIDTH)

    def forward(self, x: Any) -> Any:
        error, self.error = self.error, None
        if error is not None:
            raise error
        return super().forward(x)


class Failing(Tower):
    """Has parts that raise, and may catch it itself."""

    catches = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FailingBlock() for _ in range(6))

    def fail(self, where: str, error: BaseException) -> None:
        block: Any = self.blocks[3]
        (block if where == "block" else block.up).error = error

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            try:
                x = block(x)
            except BaseException:
                if not self.catches:
                    raise
                x = x * 0.5
        return self.head(x)


def failing() -> Any:
    torch.manual_seed(0)
    return Failing()


ERRORS = [ValueError, KeyboardInterrupt]  # torch tells of the first, and of no other BaseException


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("where", ["block", "layer"])
def test_a_forward_that_raises_half_way_is_followed_by_good_ones(
    device: str, kind: type[BaseException], where: str, tmp_path: Path
) -> None:
    model = failing()
    plain = deepcopy(model)
    with tight(model, device, tmp_path) as run:
        for _ in range(2):
            assert_same(train(model, 2), train(plain, 2))
            model.fail(where, kind())
            with pytest.raises(kind):
                loss_of(model, 0)
            assert_same(model.state_dict(), plain.state_dict())
            assert_same(loss_of(model, 3).detach(), loss_of(plain, 3).detach())
            assert active_hooks() is None
        assert_streamed(run)
    assert_same(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("has_grad", [True, False])
def test_a_run_ends_after_a_forward_that_raised(
    device: str, kind: type[BaseException], has_grad: bool, tmp_path: Path
) -> None:
    model = failing()
    plain = deepcopy(model)
    train(plain, 2)
    with pytest.raises(kind), tight(model, device, tmp_path) as run:
        train(model, 2)
        assert_streamed(run)
        model.fail("layer", kind())
        with torch.set_grad_enabled(has_grad):
            model(batch(0)[0])
    assert list(tmp_path.iterdir()) == []
    assert active_hooks() is None
    assert_same(model.state_dict(), plain.state_dict())
    assert_same(train(model), train(plain))


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("where", ["block", "layer"])
def test_a_forward_that_catches_its_own_error_goes_on(
    device: str, kind: type[BaseException], where: str, tmp_path: Path
) -> None:
    def session(model: Any) -> list[Any]:
        seen = train(model, 2)
        model.catches = True
        for _ in range(2):
            model.fail(where, kind())
            seen += train(model, 1)
            assert model.blocks[3].error is model.blocks[3].up.error is None
        model.fail(where, kind())
        with torch.no_grad():
            seen.append(model(batch(0)[0]))
        assert active_hooks() is None
        return [seen, train(model, 2)]

    check(failing(), session, device, tmp_path)


def test_an_interrupt_under_the_users_hooks_leaves_those_alone(device: str, tmp_path: Path) -> None:
    def session(model: Any) -> list[Any]:
        seen = train(model, 2)
        model.fail("layer", KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            loss_of(model, 0)
        hooks = Rounding()
        model.zero_grad()
        with hooks:
            loss = loss_of(model, 0)
            loss = loss * loss.exp()
            backward(loss)
        assert active_hooks() is None
        return [seen, gradients(model), hooks.num_packed, train(model, 2)]

    check(failing(), session, device, tmp_path)


def test_an_interrupted_thread_is_left_alone(device: str, tmp_path: Path) -> None:
    """Hooks that an interrupt left on a thread do nothing there, neither in the run nor after it."""

    def interrupt(model: Any) -> None:
        model.fail("layer", KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            loss_of(model, 0)

    model, other = failing(), tower()
    plain = deepcopy(model), deepcopy(other)
    theirs = [train(each, 2) for each in (plain[0], plain[1], plain[1], plain[0], plain[1])]
    with ThreadPoolExecutor(1) as worker, tight(model, device, tmp_path) as run:
        ours = [train(model, 2)]
        worker.submit(interrupt, model).result()
        nbytes = run.activations.nbytes
        ours.append(worker.submit(train, other, 2).result())
        assert run.activations.nbytes <= nbytes
        loss_of(model, 0)
        ours.append(worker.submit(train, other, 2).result())
        ours.append(worker.submit(train, model, 2).result())
        worker.submit(interrupt, model).result()
        assert_streamed(run)
        run.close()
        ours.append(worker.submit(train, other, 2).result())
    assert_same(ours, theirs)
    assert_same(model.state_dict(), plain[0].state_dict())


def test_a_backward_that_raises_is_followed_by_good_ones(device: str, tmp_path: Path) -> None:
    class Once:
        error: BaseException | None = None

        def __call__(self, gradient: Tensor) -> None:
            if self.error is not None:
                error, self.error = self.error, None
                raise error

    def session(model: Any) -> list[Any]:
        once = Once()
        seen = train(model, 2)
        for kind in (ValueError, KeyboardInterrupt):
            x, y = batch(0)
            hidden = model.blocks[0](x)
            hidden.register_hook(once)
            loss = functional.mse_loss(model(hidden), y)
            once.error = kind()
            model.zero_grad()
            with pytest.raises(kind):
                backward(loss, retain_graph=True)
            model.zero_grad()
            for p in model.parameters():
                p.data.mul_(1.5)  # a write that no version counter shows
            backward(loss)
            seen += [loss.detach(), gradients(model)]
        return [seen, train(model, 2)]

    check(tower(), session, device, tmp_path)


# -- graphs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activations", ["auto", "disk", "keep"])
def test_a_graph_outlives_the_run(device: str, activations: str, tmp_path: Path) -> None:
    model, plain = tower(), tower()
    more: dict[str, Any] = {"activations": activations}
    if activations == "keep":
        more |= {name: "1GiB" for name in tight_budgets(model, device, tmp_path)}
    train(plain, 2)
    with tight(model, device, tmp_path, **more) as run:
        train(model, 2)
        loss = loss_of(model, 4)
        assert activations == "keep" or run.stats().activations_out_nbytes > 0
    model.zero_grad()
    plain.zero_grad()
    backward(loss, retain_graph=True)
    first = gradients(model)
    backward(loss_of(plain, 4))
    assert_same(first, gradients(plain))
    model.zero_grad()
    backward(loss)
    assert_same(gradients(model), first)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    with pytest.raises(RuntimeError, match=r"freed|modified by an inplace operation"):
        backward(loss)


def test_what_a_graph_saved_dies_with_it_after_the_run(device: str, tmp_path: Path) -> None:
    model = tower()
    with tight(model, device, tmp_path) as run:
        loss = loss_of(model, 0)
    before = num_tensors()
    del loss
    assert num_tensors() < before - 8
    assert run.activations.nbytes == 0


@pytest.mark.parametrize("activations", ["auto", "disk"])
def test_a_graph_is_differentiated_twice(device: str, activations: str, tmp_path: Path) -> None:
    def session(model: Any) -> list[Any]:
        seen = train(model, 2)
        loss = loss_of(model, 0)
        model.zero_grad()
        backward(loss, retain_graph=True)
        once = gradients(model)
        backward(loss)
        seen += [once, gradients(model)]
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            backward(loss)
        return [seen, train(model, 2)]

    check(tower(), session, device, tmp_path, activations=activations)


def test_two_graphs_are_differentiated_in_any_order(device: str, tmp_path: Path) -> None:
    def session(model: Any) -> list[Any]:
        seen = train(model, 2)
        losses = [loss_of(model, seed) for seed in range(3)]
        with torch.no_grad():
            seen.append(model(batch(9)[0]))
        model.zero_grad()
        for i in (1, 0, 2):
            backward(losses[i])
            seen.append(gradients(model))
        return [seen, train(model, 2)]

    check(tower(), session, device, tmp_path)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "step": lambda model: torch.optim.SGD(model.parameters(), lr=0.1).step(),
    "load": lambda model: model.load_state_dict(tower(9).state_dict()),
    "one weight": lambda model: model.blocks[3].up.weight.detach().mul_(2),
}


@pytest.mark.parametrize("change", list(CHANGES))
@pytest.mark.parametrize("has_ended", [True, False])
def test_weights_changed_before_backward_raise_as_plainly(
    device: str, change: str, has_ended: bool, tmp_path: Path
) -> None:
    model, plain = tower(), tower()
    train(plain, 2)
    with ExitStack() as stack:
        run = stack.enter_context(tight(model, device, tmp_path))
        train(model, 2)
        assert_streamed(run)
        losses = loss_of(plain, 0), loss_of(model, 0)
        if has_ended:
            stack.close()
        for each, loss in zip((plain, model), losses, strict=True):
            CHANGES[change](each)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                backward(loss)
        assert_same(train(model), train(plain))


@pytest.mark.parametrize("has_ended", [True, False])
def test_weights_changed_unseen_before_backward_are_used_as_plainly(
    device: str, has_ended: bool, tmp_path: Path
) -> None:
    """A fused step raises no version counter, and neither does `.data`: backward uses the new values."""

    def session(model: Any, end: Callable[[], None]) -> list[Any]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        seen = train(model, 2)
        losses = [loss_of(model, seed) for seed in range(2)]
        end()
        optimizer.step()
        backward(losses[0])
        seen.append(gradients(model))
        for p in model.parameters():
            p.data.mul_(0.5)
        backward(losses[1])
        return [seen, gradients(model)]

    model = tower()
    theirs = session(deepcopy(model), lambda: None)
    with ExitStack() as stack:
        run = stack.enter_context(tight(model, device, tmp_path))
        assert_same(session(model, stack.close if has_ended else lambda: None), theirs)
        assert run.stats().executor["num_leases"] > 0


def test_a_weight_changed_between_two_orders_of_differentiation_raises_as_plainly(device: str, tmp_path: Path) -> None:
    def slope_of(model: Any) -> Tensor:
        x, _ = batch(0)
        x.requires_grad_()
        (slope,) = torch.autograd.grad(torch.tanh(model(x)).sum(), x, create_graph=True)
        return slope.square().sum()

    model, plain = tower(), tower()
    train(plain, 2)
    with tight(model, device, tmp_path) as run:
        train(model, 2)
        for each in (plain, model):
            slope = slope_of(each)
            with torch.no_grad():
                each.blocks[3].up.weight.mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                backward(slope)
        assert_streamed(run)


def test_an_activation_changed_before_backward_raises_as_plainly(device: str, tmp_path: Path) -> None:
    class Changing(Tower):
        def forward(self, x: Any) -> Any:
            x = self.blocks[0](x).exp()
            y = self.head(x)
            x.add_(1)
            return y

    torch.manual_seed(0)
    plain = Changing()
    model = deepcopy(plain)
    for activations in ("auto", "disk"):
        with tight(model, device, tmp_path, activations=activations) as run:
            for each in (plain, model):
                loss = loss_of(each, 0)
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    backward(loss)
                del loss  # its graph looks at the weights
            assert run.stats().executor["num_leases"] > 0


# -- threads -----------------------------------------------------------------------------------------------------------


def in_thread(work: Callable[[], Any]) -> Any:
    box: list[Any] = []

    def run() -> None:
        try:
            box.append(work())
        except BaseException as error:
            box.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    if isinstance(box[0], BaseException):
        raise box[0]
    return box[0]


def test_a_training_loop_runs_in_a_worker_thread(device: str, tmp_path: Path) -> None:
    check(tower(), lambda model: in_thread(lambda: train(model, 4)), device, tmp_path)


def test_threads_take_turns(device: str, tmp_path: Path) -> None:
    def session(model: Any) -> list[Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen: list[Any] = []
        for seed in range(4):
            loss = in_thread(lambda seed=seed: loss_of(model, seed))  # type: ignore[misc]
            optimizer.zero_grad()
            in_thread(lambda loss=loss: backward(loss)) if seed % 2 else backward(loss)  # type: ignore[misc]
            seen += [loss.detach(), gradients(model)]
            in_thread(optimizer.step)
        return seen

    check(tower(), session, device, tmp_path)


def test_a_run_is_closed_by_another_thread(device: str, tmp_path: Path) -> None:
    model = tower()
    with tight(model, device, tmp_path) as run:
        in_thread(lambda: train(model, 3))
        assert_streamed(run)
        in_thread(run.close)
    plain = tower()
    train(plain, 3)
    assert_same(model.state_dict(), plain.state_dict())


def test_forwards_on_two_threads_at_once_compute_the_same_bits(device: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(256, 256) for _ in range(12)))
    model = deepcopy(plain)
    inputs = [torch.randn(64, 256) for _ in range(3)]
    wrong: list[Any] = []
    with torch.no_grad():
        expected = [plain(x) for x in inputs]

    def loop(number: int) -> None:
        try:
            with torch.no_grad():
                for _ in range(40):
                    if not torch.equal(model(inputs[number]), expected[number]):
                        wrong.append(number)
        except BaseException as error:
            wrong.append(error)

    with tight(model, device, tmp_path, trains=False) as run:
        loop(0)
        threads = [threading.Thread(target=loop, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert_streamed(run)
    assert wrong == []


def test_training_on_one_thread_bears_evaluation_on_another(device: str, tmp_path: Path) -> None:
    """Gradients are taken and no step is made, so that every output is known."""
    plain, model = tower(), tower()
    x, _ = batch(1)
    with torch.no_grad():
        expected = plain(x)

    def iterate(model: Any, seed: int) -> list[Any]:
        model.zero_grad()
        loss = loss_of(model, seed)
        backward(loss)
        return [loss.detach(), gradients(model)]

    theirs = [iterate(plain, seed) for seed in range(12)]
    wrong: list[Any] = []
    is_over = threading.Event()

    def evaluate() -> None:
        try:
            with torch.no_grad():
                while not is_over.is_set():
                    if not torch.equal(model(x), expected):
                        wrong.append("an output")
        except BaseException as error:
            wrong.append(error)

    with tight(model, device, tmp_path) as run:
        backward(loss_of(model, 0))
        thread = threading.Thread(target=evaluate)
        thread.start()
        try:
            for seed, expected_gradients in enumerate(theirs):
                assert_same(iterate(model, seed), expected_gradients)
        finally:
            is_over.set()
            thread.join()
        assert_streamed(run)
    assert wrong == []


def test_a_forward_that_waits_for_another_threads_gets_an_error(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetero.turns.PATIENCE_S", 0.2)

    class Parallel(Tower):
        is_parallel = False

        def forward(self, x: Any) -> Any:
            if not self.is_parallel:
                return super().forward(x)
            has_grad = torch.is_grad_enabled()

            def call(block: nn.Module) -> Tensor:
                with torch.set_grad_enabled(has_grad):
                    return block(x)  # type: ignore[no-any-return]

            parts = [in_thread(lambda block=block: call(block)) for block in self.blocks]  # type: ignore[misc]
            return self.head(torch.stack(parts).sum(0))

    torch.manual_seed(0)
    model = Parallel()
    plain = deepcopy(model)
    train(plain, 2)
    with tight(model, device, tmp_path) as run:
        train(model, 2)
        model.is_parallel = True
        with pytest.raises(hetero.HeteroError, match="in turns"):
            loss_of(model, 0)
        model.is_parallel = False
        assert_same(train(model), train(plain))
        assert_streamed(run)
    model.is_parallel = plain.is_parallel = True
    assert_same(train(model), train(plain))


def test_close_is_refused_in_the_middle_of_a_pass(device: str, tmp_path: Path) -> None:
    class Closing(Tower):
        run: Any = None

        def forward(self, x: Any) -> Any:
            if self.run is not None:
                self.run.close()
            return super().forward(x)

    torch.manual_seed(0)
    model = Closing()
    with tight(model, device, tmp_path) as run:
        train(model, 2)
        model.run = run
        with pytest.raises(hetero.HeteroError, match="middle of a pass"):
            loss_of(model, 0)
        model.run = None
        x, _ = batch(0)
        assert torch.equal(model(x), deepcopy(model)(x))
        assert_streamed(run)
