"""What people do with torch while they train: a wrapped model does it to the bit as a plain one does."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import hetero
from tests.exact.feature_rig import (
    DEVICES,
    WIDTH,
    Tower,
    assert_same,
    assert_streamed,
    backward,
    batch,
    check,
    gradients,
    loss_of,
    tight,
    tower,
    train,
)
from tests.tiny_models import VOCAB, tiny_model

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.parametrize("device", DEVICES),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # forward-mode differentiation uses it itself
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),  # Dynamo looks at its inputs
    pytest.mark.filterwarnings("ignore:Using `torch.compile\\(module\\)` when there are global hooks:UserWarning"),
]


def tokens(seed: int, length: int = 12) -> Tensor:
    return torch.randint(3, VOCAB, (2, length), generator=torch.Generator().manual_seed(seed))


def train_llama(model: Any, num_steps: int = 3, learning_rate: float = 0.05) -> list[Any]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=learning_rate)
    model.train()
    seen: list[Any] = []
    for step in range(num_steps):
        optimizer.zero_grad()
        ids = tokens(step)
        out = model(input_ids=ids, labels=ids, use_cache=False)
        backward(out.loss)
        seen += [out.logits.detach(), gradients(model)]
        optimizer.step()
    return seen


# -- activation checkpointing ------------------------------------------------------------------------------------------


class CheckpointedTower(Tower):
    use_reentrant = False
    num_computed = 0

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = checkpoint(self._compute, block, x, use_reentrant=self.use_reentrant)
        return self.head(x)

    def _compute(self, block: nn.Module, x: Tensor) -> Tensor:
        self.num_computed += 1
        return block(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not-reentrant"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_checkpointed_block_is_computed_twice_with_the_same_bits(
    device: str, use_reentrant: bool, dropout: float, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = CheckpointedTower(dropout=dropout)
    model.use_reentrant = use_reentrant

    def session(model: Any) -> list[Any]:
        seen: list[Any] = []
        for step in range(3):
            x, y = batch(step)
            loss = functional.mse_loss(model(x.requires_grad_()), y)
            backward(loss)
            seen += [loss.detach(), x.grad, gradients(model), model.num_computed]
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
                    p.grad = None
        return seen

    check(model, session, device, tmp_path)


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not-reentrant"])
def test_blocks_that_are_checkpointed_by_the_training_loop_are_computed_twice(
    device: str, use_reentrant: bool, tmp_path: Path
) -> None:
    def session(model: Any) -> list[Any]:
        seen: list[Any] = []
        num_computed = 0

        def count(*_: Any) -> None:
            nonlocal num_computed
            num_computed += 1

        handles = [block.register_forward_pre_hook(count) for block in model.blocks]
        for step in range(3):
            x, y = batch(step)
            x.requires_grad_()
            hidden = x
            for block in model.blocks:
                hidden = checkpoint(block, hidden, use_reentrant=use_reentrant)
            loss = functional.mse_loss(model.head(hidden), y)
            backward(loss)
            seen += [loss.detach(), x.grad, gradients(model), num_computed]
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
                    p.grad = None
        for handle in handles:
            handle.remove()
        return seen

    check(tower(), session, device, tmp_path)


class SelectiveTower(Tower):
    def forward(self, x: Any) -> Any:
        contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return self.head(x)


def test_a_selective_checkpoint_computes_the_rest_again(device: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    check(SelectiveTower(), train, device, tmp_path)


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not-reentrant"])
def test_llama_trains_with_gradient_checkpointing(device: str, use_reentrant: bool, tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    check(model, train_llama, device, tmp_path)


# -- autocast ----------------------------------------------------------------------------------------------------------


class Shared(nn.Module):
    """A weight used three times in one forward, once transposed."""

    def __init__(self, num_layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))

    def forward(self, x: Any) -> Any:
        layer: Any
        for layer in self.layers:
            x = torch.tanh(layer(torch.tanh(layer(x))) @ layer.weight.t())
        return x


def autocast_session(model: Any) -> list[Any]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    seen: list[Any] = []
    for step in range(3):
        for part in range(3):
            x, y = batch(3 * step + part)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = model(x)
                loss = functional.mse_loss(out.float(), y)
            backward(loss)
            seen += [out.detach(), gradients(model)]
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("kind", ["trainable", "partly frozen", "shared"])
def test_autocast_casts_the_true_weights(device: str, kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Shared() if kind == "shared" else Tower()
    if kind == "partly frozen":
        for block in list(model.blocks)[::2]:  # type: ignore[arg-type]
            block.requires_grad_(False)
    check(model, autocast_session, device, tmp_path)


def test_autocast_around_several_forwards_casts_each_weight_once(device: str, tmp_path: Path) -> None:
    def session(model: Any) -> list[Any]:
        seen: list[Any] = []
        for step in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                losses = [functional.mse_loss(model(batch(part)[0]).float(), batch(part)[1]) for part in range(2)]
            backward(torch.stack(losses).sum())
            seen += [gradients(model)]
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad * (step + 1)
                    p.grad = None
        return seen

    check(tower(), session, device, tmp_path)


def linears(num_layers: int) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)))


@pytest.mark.parametrize("is_frozen", [False, True])
def test_the_copies_that_autocast_makes_of_weights_are_no_activations(
    device: str, is_frozen: bool, tmp_path: Path
) -> None:
    model = linears(24).requires_grad_(not is_frozen)
    x, _ = batch(0)
    with tight(model, device, tmp_path) as run:
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = model(x.requires_grad_())
            holders = run.stats().tiers["gpu" if device == "emulated" else "cpu"].holders
            # Of each layer its input, in bfloat16, unless only the weight's gradient needs it.
            assert holders.get("activations", 0) == (0 if is_frozen else 24 * x.numel() * 2)
            backward(out.float().sum())
        assert_streamed(run)


def test_a_weight_changed_after_an_autocast_forward_is_refused_by_its_backward(device: str, tmp_path: Path) -> None:
    """Plain torch would use its own copy, which is not kept here: an error, never another gradient."""
    model = linears(24)
    plain = deepcopy(model)
    autocast_session(plain)
    with tight(model, device, tmp_path) as run:
        autocast_session(model)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = functional.mse_loss(model(batch(0)[0]).float(), batch(0)[1])
        for each in (model, plain):
            with torch.no_grad():
                each[7].weight.mul_(1.5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            backward(loss)
        model.zero_grad()
        plain.zero_grad()
        assert_same(autocast_session(model), autocast_session(plain))
        assert_streamed(run)


# -- LoRA, generation, several models ----------------------------------------------------------------------------------


class LoRALinear(nn.Module):
    """A frozen linear layer with a trainable low-rank correction, as PEFT injects it."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.normal_(self.up.weight, std=0.1)

    def forward(self, x: Any) -> Any:
        return self.base(x) + self.up(self.down(x)) * 2.0

    @torch.no_grad()
    def merge(self) -> nn.Linear:
        self.base.weight += 2.0 * self.up.weight @ self.down.weight
        return self.base


def inject_lora(model: Any) -> Any:
    model.requires_grad_(False)
    torch.manual_seed(3)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, LoRALinear(getattr(layer.self_attn, name)))
    return model


def merge_lora(model: Any) -> None:
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, getattr(layer.self_attn, name).merge())


def test_lora_trains_and_merges(device: str, tmp_path: Path) -> None:
    def session(model: Any) -> list[Any]:
        seen = train_llama(model)
        merge_lora(model)
        model.eval()
        with torch.no_grad():
            seen.append(model(input_ids=tokens(9)).logits)
        return seen

    check(inject_lora(tiny_model("llama")), session, device, tmp_path)


def test_lora_can_be_injected_after_wrap(device: str, tmp_path: Path) -> None:
    def session(model: Any) -> list[Any]:
        with torch.no_grad():
            before = model(input_ids=tokens(9)).logits
        inject_lora(model)
        return [before, *train_llama(model)]

    check(tiny_model("llama"), session, device, tmp_path)


def test_lora_writes_no_frozen_weight(device: str, tmp_path: Path) -> None:
    model = inject_lora(tiny_model("llama"))
    with tight(model, device, tmp_path) as run:
        train_llama(model, 2)
        written = run.stats().disk_written_nbytes - run.stats().activations_out_nbytes
        train_llama(model, 3)
        assert_streamed(run)
        assert run.stats().disk_written_nbytes - run.stats().activations_out_nbytes == written


def test_llama_trains_evaluates_generates_and_trains_on(device: str, tmp_path: Path) -> None:
    def session(model: Any) -> list[Any]:
        seen = train_llama(model)
        model.eval()
        with torch.no_grad():
            seen.append(model(input_ids=tokens(5)).logits)
        seen.append(model.generate(tokens(6, 5), max_new_tokens=6, do_sample=False, use_cache=True))
        with torch.inference_mode():
            seen.append(model(input_ids=tokens(7)).logits.clone())
        seen.append(model.generate(tokens(8, 5), max_new_tokens=4, do_sample=True, use_cache=False))
        return [*seen, *train_llama(model)]

    check(tiny_model("llama"), session, device, tmp_path)


def test_evaluation_first_leaves_room_for_what_training_saves(device: str, tmp_path: Path) -> None:
    """The plan for a forward without gradients may give all that is left to the ring."""

    def session(model: Any) -> list[Any]:
        with torch.no_grad():
            seen = [model(batch(seed)[0]) for seed in range(4)]
        return [seen, train(model)]

    check(tower(), session, device, tmp_path)


def distil(student: Any, teacher: Any) -> list[Any]:
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-2)
    seen: list[Any] = []
    for step in range(4):
        x, _ = batch(step)
        with torch.no_grad():
            goal = teacher(x)
        loss = functional.mse_loss(student(x), goal)
        loss = loss + functional.mse_loss(teacher(student(x)), goal)
        backward(loss)
        seen += [loss.detach(), gradients(student), gradients(teacher)]
        optimizer.step()
        optimizer.zero_grad()
        teacher.zero_grad()
    return seen


def test_two_wrapped_models_distil(device: str, tmp_path: Path) -> None:
    student, teacher = tower(1), tower(2)
    theirs = distil(deepcopy(student), deepcopy(teacher))
    folders = tmp_path / "student", tmp_path / "teacher"
    for folder in folders:
        folder.mkdir()
    with tight(student, device, folders[0]) as one, tight(teacher, device, folders[1]) as other:
        assert_same(distil(student, teacher), theirs)
        assert_streamed(one)
        assert_streamed(other)


class WithTeacher(Tower):
    """Calls another model, which it does not own, inside its own forward, between its own layers."""

    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.others = [teacher]

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
            x = x + 0.1 * self.others[0](x)
        return self.head(x)


def test_a_wrapped_model_calls_another_inside_its_forward(device: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    student = WithTeacher(tower(2, num_blocks=3))
    plain = deepcopy(student)
    theirs = [train(plain), gradients(plain.others[0])]
    folders = tmp_path / "student", tmp_path / "teacher"
    for folder in folders:
        folder.mkdir()
    with tight(student, device, folders[0]) as one, tight(student.others[0], device, folders[1]) as other:
        assert_same([train(student), gradients(student.others[0])], theirs)
        assert_streamed(one)
        assert_streamed(other)


# -- optimizers --------------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd-single": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=False),
    "sgd-foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
    "adam-single": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=False),
    "adam-foreach": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "adamw-single": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adagrad-fused": lambda p: torch.optim.Adagrad(p, lr=1e-2, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5),
}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_any_optimizer_steps_on_the_true_weights(device: str, name: str, tmp_path: Path) -> None:
    def session(model: Any) -> list[Any]:
        optimizer = OPTIMIZERS[name](list(model.parameters()))
        return [train(model, 3, optimizer), [list(optimizer.state[p].values()) for p in model.parameters()]]

    check(tower(), session, device, tmp_path)


def test_an_optimizer_made_before_wrap_goes_on(device: str, tmp_path: Path) -> None:
    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    plain, model = tower(), tower()
    optimizers = optimizer_of(plain), optimizer_of(model)
    assert_same(train(model, 2, optimizers[1]), train(plain, 2, optimizers[0]))
    with tight(model, device, tmp_path) as run:
        assert_same(train(model, 4, optimizers[1]), train(plain, 4, optimizers[0]))
        assert_streamed(run)
    assert_same(train(model, 2, optimizers[1]), train(plain, 2, optimizers[0]))


def test_lbfgs_calls_its_closure(device: str, tmp_path: Path) -> None:
    def session(model: Any) -> list[Any]:
        optimizer = torch.optim.LBFGS(
            model.parameters(), lr=0.1, max_iter=4, history_size=3, line_search_fn="strong_wolfe"
        )
        seen: list[Any] = []

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, 0)
            backward(loss)
            seen.append(loss.detach())
            return loss

        for _ in range(2):
            optimizer.step(closure)  # type: ignore[no-untyped-call]
        assert len(seen) > 4
        return seen

    check(tower(), session, device, tmp_path)


def test_the_optimizer_runs_inside_backward(device: str, tmp_path: Path) -> None:
    def session(model: Any) -> list[Any]:
        optimizers = {p: torch.optim.AdamW([p], lr=1e-2) for p in model.parameters()}
        norms: list[Any] = []

        def step(p: Tensor) -> None:
            assert p.grad is not None
            norms.append(p.grad.norm())
            optimizers[p].step()
            optimizers[p].zero_grad()

        handles = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
        losses = []
        for seed in range(4):
            loss = loss_of(model, seed)
            backward(loss)
            losses.append(loss.detach())
        for handle in handles:
            handle.remove()
        assert all(p.grad is None for p in model.parameters())
        return [losses, norms]

    check(tower(), session, device, tmp_path)


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not-reentrant"])
def test_the_optimizer_runs_inside_a_checkpointed_backward(device: str, use_reentrant: bool, tmp_path: Path) -> None:
    """A shared block is computed again after a step on it would be too early: torch says when its gradient is whole."""

    def session(model: Any) -> list[Any]:
        def step(p: Tensor) -> None:
            assert p.grad is not None
            p.data.add_(p.grad, alpha=-0.1)  # a write that no version counter shows
            p.grad = None

        handles = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
        losses = []
        for seed in range(4):
            x, y = batch(seed)
            loss = functional.mse_loss(model(x.requires_grad_()), y)
            backward(loss)
            losses.append(loss.detach())
        for handle in handles:
            handle.remove()
        return losses

    torch.manual_seed(0)
    model = CheckpointedTower()
    model.use_reentrant = use_reentrant
    check(model, session, device, tmp_path)


@pytest.mark.parametrize("foreach", [True, False])
def test_gradients_are_clipped_scaled_and_the_learning_rate_scheduled(
    device: str, foreach: bool, tmp_path: Path
) -> None:
    def session(model: Any) -> list[Any]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=8)
        scaler = torch.amp.GradScaler("cpu", init_scale=3000.0, growth_interval=2)
        seen: list[Any] = []
        scales: list[float] = []
        for step in range(5):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=step % 2 == 0):
                loss = loss_of(model, step)
            backward(scaler.scale(loss * (1e38 if step == 3 else 1.0)))  # one step is skipped
            scaler.unscale_(optimizer)
            seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=foreach))
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            scales.append(scaler.get_scale())
            seen += [loss.detach(), scheduler.get_last_lr()]
        assert scales == [3000.0, 6000.0, 6000.0, 3000.0, 3000.0]
        return [value for value in seen if not isinstance(value, Tensor) or value.isfinite()]

    check(tower(), session, device, tmp_path)


# -- torch.func and autograd -------------------------------------------------------------------------------------------


def in_the_middle(session: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The session between two pieces of ordinary training."""
    return lambda model: [train(model, 2), session(model), train(model, 1)]


def functional_gradient(model: Any) -> Any:
    x, y = batch(0)

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return functional.mse_loss(torch.func.functional_call(model, parameters, (x,)), y)

    return torch.func.grad(loss)(dict(model.named_parameters()))


def per_sample_gradients(model: Any) -> Any:
    x, y = batch(0, 4)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(torch.func.functional_call(model, parameters, (x[None],)), y[None])

    return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, x, y)


def vmapped(model: Any) -> Any:
    return torch.func.vmap(model)(batch(0)[0])


def called_with_other_weights(model: Any) -> Any:
    x, y = batch(0)
    doubled = {name: (2 * p.detach()).requires_grad_() for name, p in model.named_parameters()}
    out = torch.func.functional_call(model, doubled, (x,))
    backward(functional.mse_loss(out, y))
    return [out.detach(), [p.grad for p in doubled.values()]]


def called_with_one_other_weight(model: Any) -> Any:
    x, y = batch(0)
    name, weight = next(iter(model.named_parameters()))
    other = (2 * weight.detach()).requires_grad_()
    out = torch.func.functional_call(model, {name: other}, (x,))
    return [out.detach(), torch.autograd.grad(functional.mse_loss(out, y), [other, *list(model.parameters())[1:]])]


def stacked_ensemble(model: Any) -> Any:
    x, _ = batch(0)
    stacked, buffers = torch.func.stack_module_state([model, model])

    def call(parameters: Any, buffers: Any) -> Any:
        return torch.func.functional_call(model, (parameters, buffers), (x,))

    return torch.func.vmap(call)(stacked, buffers)


def jvp_of_inputs(model: Any) -> Any:
    x, v = batch(0)
    return torch.func.jvp(model, (x,), (v,))


def dual_numbers(model: Any) -> Any:
    from torch.autograd import forward_ad

    x, v = batch(0)
    with forward_ad.dual_level():
        out = forward_ad.unpack_dual(model(forward_ad.make_dual(x, v)))  # type: ignore[no-untyped-call]
        return [out.primal.detach(), out.tangent.detach()]


def dual_numbers_of_weights(model: Any) -> Any:
    from torch.autograd import forward_ad

    x, _ = batch(0)
    with forward_ad.dual_level():
        dual: Any = forward_ad.make_dual
        duals = {name: dual(p, torch.ones_like(p)) for name, p in model.named_parameters()}
        out = forward_ad.unpack_dual(torch.func.functional_call(model, duals, (x,)))  # type: ignore[no-untyped-call]
        return [out.primal.detach(), out.tangent.detach()]


def hessian_vector_product(model: Any) -> Any:
    x, v = batch(0)
    return torch.autograd.functional.hvp(lambda x: model(x).square().sum(), x, v)  # type: ignore[no-untyped-call]


def jacobian(model: Any) -> Any:
    return torch.autograd.functional.jacobian(model, batch(0, 2)[0])  # type: ignore[no-untyped-call]


def autograd_gradient(model: Any) -> Any:
    x, y = batch(0)
    x.requires_grad_()
    loss = functional.mse_loss(model(x), y)
    return torch.autograd.grad(loss, [x, *model.parameters()])


def gradient_of_some(model: Any) -> Any:
    loss = loss_of(model, 0)
    return torch.autograd.grad(loss, [model.blocks[3].up.weight, model.head.bias])


def gradient_penalty(model: Any) -> Any:
    seen: list[Any] = []
    for seed in range(3):
        x, _ = batch(seed)
        x.requires_grad_()
        out = torch.tanh(model(x)).square()
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = out.mean() + (slope.norm(dim=1) - 1).square().mean()
        model.zero_grad()
        backward(loss)
        seen += [loss.detach(), slope.detach(), gradients(model)]
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= 0.01 * p.grad
    return seen


def hessian_trace(model: Any) -> Any:
    loss = loss_of(model, 0)
    parameters = list(model.parameters())
    first = torch.autograd.grad(loss, parameters, create_graph=True)
    torch.manual_seed(2)
    probe = [torch.randn_like(p) for p in parameters]
    product = sum((g * v).sum() for g, v in zip(first, probe, strict=True))
    return torch.autograd.grad(product, parameters)  # type: ignore[arg-type]


def maml(model: Any) -> Any:
    """Inner steps through functional_call with create_graph, outer gradients on the true parameters."""
    fast = dict(model.named_parameters())
    for seed in range(2):
        x, y = batch(seed)
        loss = functional.mse_loss(torch.func.functional_call(model, fast, (x,)), y)
        slopes = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
        fast = {name: p - 0.1 * g for (name, p), g in zip(fast.items(), slopes, strict=True)}
    x, y = batch(5)
    outer = functional.mse_loss(torch.func.functional_call(model, fast, (x,)), y)
    return [outer.detach(), torch.autograd.grad(outer, list(model.parameters()))]


AUTOGRAD_SESSIONS = [
    functional_gradient,
    per_sample_gradients,
    vmapped,
    called_with_other_weights,
    called_with_one_other_weight,
    stacked_ensemble,
    jvp_of_inputs,
    dual_numbers,
    dual_numbers_of_weights,
    hessian_vector_product,
    jacobian,
    autograd_gradient,
    gradient_of_some,
    gradient_penalty,
    hessian_trace,
    maml,
]


@pytest.mark.parametrize("session", AUTOGRAD_SESSIONS, ids=lambda session: session.__name__.replace("_", "-"))
def test_gradients_of_every_kind_are_those_of_a_plain_model(
    device: str, session: Callable[[Any], Any], tmp_path: Path
) -> None:
    check(tower(), in_the_middle(session), device, tmp_path)


class Energy(nn.Module):
    """Predicts a force as the gradient of an energy, inside its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()

    def forward(self, x: Any) -> Any:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.tower(x).square().sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=torch.is_grad_enabled())
        return force


def test_a_forward_that_differentiates_itself_trains(device: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    check(Energy(), train, device, tmp_path)


class ComplexLinear(nn.Module):
    """A real parameter read as complex numbers, conjugated without a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, 2) / 8)

    def forward(self, x: Any) -> Any:
        matrix = torch.view_as_complex(self.weight)
        x = x @ matrix.conj() + (x * 0.5).conj() @ matrix.mH
        return x * x.conj().imag.sigmoid()


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(ComplexLinear() for _ in range(8)))

    def forward(self, x: Any) -> Any:
        out = self.layers(torch.complex(x, x.flip(0)))
        return out.real


def test_lazily_conjugated_weights_and_activations_keep_their_sign(device: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    check(Complex(), train, device, tmp_path)
    folder = tmp_path / "saved to disk"
    folder.mkdir()
    check(Complex(), train, device, folder, activations="disk")


def counted(model: Any) -> Any:
    with FlopCounterMode(display=False) as counter:
        seen = train(model, 1)
    return [seen, counter.get_total_flops()]


def under_anomaly_detection(model: Any) -> Any:
    with torch.autograd.set_detect_anomaly(True):
        return train(model, 1)


def hooked(model: Any) -> Any:
    """Hooks of the user's read weights before and after a block, in both directions."""
    seen: list[Any] = []

    def look(module: Any, *_: Any) -> None:
        seen.append(module.up.weight.detach().clone())

    handles = [
        register(look)
        for block in model.blocks
        for register in (
            block.register_forward_pre_hook,
            block.register_forward_hook,
            block.register_full_backward_pre_hook,
            block.register_full_backward_hook,
        )
    ]
    seen += train(model, 2)
    for handle in handles:
        handle.remove()
    return seen


def changed_by_hooks(model: Any) -> Any:
    handles = [
        model.blocks[0].register_forward_pre_hook(lambda module, args: (args[0] * 0.5,)),
        model.blocks[1].register_forward_hook(lambda module, args, output: output * module.norm.weight),
        model.blocks[2].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,)),
        model.blocks[3].up.weight.register_hook(lambda gradient: gradient * 0.5),
    ]
    seen = train(model, 2)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")  # plain torch warns of it too
@pytest.mark.parametrize(
    "session", [counted, under_anomaly_detection, hooked, changed_by_hooks], ids=lambda s: s.__name__.replace("_", "-")
)
def test_who_looks_on_sees_a_plain_model(device: str, session: Callable[[Any], Any], tmp_path: Path) -> None:
    check(tower(), in_the_middle(session), device, tmp_path)


def test_a_forward_of_fake_tensors_leaves_the_weights_alone(device: str, tmp_path: Path) -> None:
    def session(model: Any) -> list[Any]:
        seen = train(model, 2)
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            shape = model(torch.empty(3, WIDTH)).shape
        assert shape == (3, WIDTH)
        return [seen, train(model, 2)]

    check(tower(), session, device, tmp_path)


# -- compilers ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_dynamo() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_block_computes_and_trains_as_a_plain_one(
    device: str, backend: str, when: str, tmp_path: Path
) -> None:
    def compile_blocks(model: Any) -> None:
        for block in list(model.blocks)[2:4]:
            block.compile(backend=backend)

    model, plain = tower(), tower()
    theirs = train(plain)
    if when == "before":
        compile_blocks(model)
    with tight(model, device, tmp_path) as run:
        if when == "after":
            compile_blocks(model)
        assert_same(train(model), theirs)
        assert_streamed(run)
    assert_same(model.state_dict(), plain.state_dict())
    assert_same(train(model), train(plain))


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_whole_compiled_model_computes_as_a_plain_one(device: str, tmp_path: Path) -> None:
    model, plain = tower(), tower()
    with tight(model, device, tmp_path) as run:
        assert_same(train(model, 2), train(plain, 2))
        compiled = torch.compile(model, backend="aot_eager")
        assert_same(train(compiled), train(plain))
        assert_streamed(run)
    assert_same(train(compiled), train(plain))


def test_a_wrapped_model_can_be_scripted_and_traced(device: str, tmp_path: Path) -> None:
    model = linears(8).requires_grad_(False)
    x, _ = batch(0)
    with tight(model, device, tmp_path, trains=False) as run:
        expected = model(x)
        scripted = torch.jit.script(model)
        traced = torch.jit.trace(model, (x,))  # type: ignore[no-untyped-call]
        assert torch.equal(scripted(x), expected)
        assert torch.equal(traced(x), expected)
        assert_streamed(run)
        with torch.no_grad():
            model[0].weight.mul_(2)
        assert torch.equal(scripted(x), model(x))
        assert torch.equal(traced(x), model(x))
    assert torch.equal(scripted(x), model(x))
    assert torch.equal(traced(x), model(x))


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_wrapped_model_can_be_exported(device: str, tmp_path: Path) -> None:
    """As export does by default; strict=True fails wherever any global module hook is registered."""
    model = tower()
    x, _ = batch(0)
    with tight(model, device, tmp_path) as run:
        train(model, 2)
        expected = model(x).detach()
        exported = torch.export.export(model, (x,))
        assert torch.equal(exported.module()(x), expected)
        assert torch.equal(model(x), expected)
        assert_streamed(run)
    assert torch.equal(exported.module()(x), expected)


def test_wrap_refuses_no_torch_feature_silently(device: str, tmp_path: Path) -> None:
    """Nothing of ours stays on a thread: hooks that torch.func refuses are gone between the passes."""
    model = tower()
    with tight(model, device, tmp_path) as run:
        train(model, 2)
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        assert_streamed(run)
    assert isinstance(run, hetero.wrapped.WrappedRun)


class Tagged(Tensor):
    """A tensor that means something more."""


class ScalesTagged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tag: Tensor) -> Tensor:
        ctx.save_for_backward(tag)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (tag,) = ctx.saved_tensors
        assert type(tag) is Tagged
        return gradient * 2, None


def test_a_saved_tensor_keeps_its_class(device: str, tmp_path: Path) -> None:
    class Tagging(Tower):
        def forward(self, x: Any) -> Any:
            return ScalesTagged.apply(super().forward(x), torch.ones(3).as_subclass(Tagged))  # type: ignore[no-untyped-call]

    torch.manual_seed(0)
    model = Tagging()
    with tight(model, device, tmp_path) as run:
        backward(loss_of(model, 0))
        assert run.stats().executor["num_leases"] > 0
