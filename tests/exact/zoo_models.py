"""Modules of every kind that moving weights could break, a few hundred kB each; what they need is random."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from transformers import T5Config, T5ForConditionalGeneration

from tests.exact.wrap_rig import Batch
from tests.tiny_models import tiny_model

WIDTH = 64


def rows(count: int = 5, width: int = WIDTH) -> Callable[[], Batch]:
    return lambda: (torch.randn(count, width),)


def ids(count: int = 7, size: int = 128) -> Callable[[], Batch]:
    return lambda: (torch.randint(0, size, (2, count)),)


def layers(depth: int = 4, width: int = WIDTH) -> nn.Sequential:
    blocks = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)]
    return nn.Sequential(*blocks)


# -- parameters that are shared, frozen, read elsewhere ----------------------------------------------------------------


class Tied(nn.Module):
    """An embedding whose weight is the head's, as one Parameter or as two that share a storage."""

    def __init__(self, by_storage: bool, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, WIDTH)
        self.body = layers(depth)
        self.head = nn.Linear(WIDTH, 128, bias=False)
        if by_storage:
            self.head.weight.data = self.embedding.weight.data
        else:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.body(self.embedding(tokens))))


def partly_frozen() -> nn.Module:
    model = layers(5)
    for block in (model[0], model[3]):
        for parameter in block.parameters():
            parameter.requires_grad_(False)
    return model


class ReadOutside(nn.Module):
    """Weights of child modules, read by the parent: never by the module that owns them, or in between."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, WIDTH)
        self.body = layers(2)
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.body(self.embedding(tokens))
        x = x @ self.other.weight.t() + x @ self.other.weight[:, : WIDTH // 2].repeat(1, 2)
        x = self.body(torch.tanh(x))
        return F.linear(x, self.embedding.weight)


class SavesView(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        half = weight.t()[:, 1::2]
        ctx.save_for_backward(x, half)
        return x @ half

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, half = ctx.saved_tensors
        of_weight = torch.zeros(half.shape[1] * 2, half.shape[0])
        of_weight[1::2] = gradients[0].t() @ x
        return gradients[0] @ half.t(), of_weight


class KeepsParameter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(x)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        return gradients[0] @ ctx.weight.t(), x.t() @ gradients[0]


class KeepsView(KeepsParameter):
    """A view on the context, which no hook of autograd sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return KeepsParameter.forward(ctx, x, weight.detach()[:])


class Applies(nn.Module):
    """Custom autograd functions on weights."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.function.apply(x, self.weight))  # type: ignore[no-untyped-call]


def custom_functions() -> nn.Module:
    return nn.Sequential(
        layers(1),
        Applies(SavesView),
        nn.Linear(WIDTH // 2, WIDTH),
        Applies(KeepsParameter),
        layers(1),
        Applies(KeepsView),
        layers(1),
    )


class Shared(nn.Module):
    """One module under two names, and called twice more by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.first = layers(2)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.again = self.first
        self.last = layers(1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.second(self.first(x)))
        return cast(Tensor, self.last(self.first[0](self.second(x))))


class Rooted(nn.Module):
    """Parameters at the root, used before, between and after its children."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.body = layers(4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.body:
            x = block(x @ self.weight) * self.scale
        return x @ self.weight.t()


class Overlapping(nn.Module):
    """Two parameters that view one storage and overlap, two that view one and do not."""

    def __init__(self) -> None:
        super().__init__()
        store = torch.randn(3 * WIDTH, WIDTH) / 16
        self.low = nn.Parameter(store[: 2 * WIDTH])
        self.high = nn.Parameter(store[WIDTH:])
        apart = torch.randn(2, WIDTH, WIDTH) / 16
        self.left = nn.Parameter(apart[0])
        self.right = nn.Parameter(apart[1])

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.left
        x = torch.tanh(F.linear(x, self.low)[:, WIDTH:] + F.linear(x, self.high)[:, :WIDTH])
        return x @ self.right


def overlapping() -> nn.Module:
    """With one more parameter inside another's, in another module."""
    model = nn.Sequential(layers(3), Overlapping(), layers(3), Overlapping(), nn.Linear(WIDTH, 59, bias=False))
    outer = cast(nn.Linear, cast(nn.Sequential, cast(nn.Sequential, model[2])[0])[0])
    cast(nn.Linear, model[4]).weight = nn.Parameter(outer.weight.data[5:])
    return model


class Odd(nn.Module):
    """Parameters of no elements, of no dimension, transposed, strided, in channels-last order, expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.body = layers(3)
        self.empty = nn.Parameter(torch.empty(0, WIDTH))
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.transposed = nn.Parameter((torch.randn(48, WIDTH) / 8).t())
        self.strided = nn.Parameter((torch.randn(48, 2 * WIDTH) / 8)[:, ::2])
        self.offset = nn.Parameter((torch.randn(WIDTH * WIDTH + 3) / 8)[3:].view(WIDTH, WIDTH))
        self.expanded = nn.Parameter(torch.randn(WIDTH * 20, 1).expand(-1, 3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.body(x) * self.scalar, self.empty])
        x = torch.tanh(x @ self.transposed) @ self.strided
        return x @ self.offset + self.expanded.sum(1)[:WIDTH]


class Unused(nn.Module):
    """A head that nobody calls, and one that only some steps call: no gradient is not a gradient of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.body = layers(3)
        self.never = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return cast(Tensor, self.sometimes(x)) if x.shape[0] % 2 else x


class Integers(nn.Module):
    """int8 and bool tensors, as buffers and as parameters without gradient."""

    shift: Tensor
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = layers(3)
        self.packed = nn.Parameter(torch.randint(-128, 128, (2 * WIDTH, WIDTH), dtype=torch.int8), requires_grad=False)
        self.keep = nn.Parameter(torch.rand(2 * WIDTH, WIDTH) < 0.5, requires_grad=False)
        self.scale = nn.Parameter(torch.rand(2 * WIDTH) / 512)
        self.register_buffer("shift", torch.randint(-128, 128, (2 * WIDTH, WIDTH), dtype=torch.int8))
        self.register_buffer("mask", torch.rand(8192) < 0.5, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = (self.packed.float() + self.shift) * self.scale[:, None]
        x = F.linear(self.body(x), torch.where(self.keep, weight, weight / 2))
        return x * self.mask[: x.shape[1]]


class Complex(nn.Module):
    """Complex weights, conjugated lazily; the real part goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / 8)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.complex(x, x.flip(-1))
        z = z @ self.weight.conj() + z @ self.weight.mH + z.conj() @ self.weight
        return torch.tanh(z.imag) @ self.weight.conj().imag + z.conj().imag * z.real


def complex_layers() -> nn.Module:
    return nn.Sequential(layers(2), Complex(), layers(1), Complex())


class Stacked(nn.Module):
    """One parameter of which views are the weights of several layers."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 8)
        self.body = layers(5)

    def forward(self, x: Tensor) -> Tensor:
        for block, weight in zip(self.body, self.weights.unbind(0), strict=False):
            x = torch.tanh(block(x) @ weight)
        for weight in self.weights.view(8, WIDTH // 2, WIDTH):
            x = torch.tanh(self.body[4](x) @ weight.t() @ weight)
        return torch.einsum("bi,nij->bj", x, self.weights)


class Listed(nn.Module):
    """Parameters in a list and in a dictionary, which are modules that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(WIDTH, WIDTH) / 8 for _ in range(3)])
        self.named = nn.ParameterDict({"last": torch.randn(WIDTH, WIDTH) / 8})
        self.body = layers(3)

    def forward(self, x: Tensor) -> Tensor:
        for block, weight in zip(self.body, self.weights, strict=True):
            x = torch.tanh(block(x @ weight))
        return cast(Tensor, x @ self.named["last"])


class Descends(nn.Module):
    """A module that runs a backward in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.energy, self.body = layers(2), layers(3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.energy(z).square().sum(), z)
        return cast(Tensor, self.body(x - 0.1 * slope))


# -- modules that write, or have more than weights ---------------------------------------------------------------------


def convolutions() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 32, 3, stride=2, bias=False),
        nn.BatchNorm2d(32, momentum=None),
        nn.ReLU(inplace=True),
        nn.Conv2d(32, 32, 3, groups=2),
        nn.InstanceNorm2d(32, affine=True, track_running_stats=True),
        nn.GELU(),
        nn.ConvTranspose2d(32, 16, 3),
    )
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def images() -> Batch:
    return (torch.randn(3, 3, 9, 9).to(memory_format=torch.channels_last),)


class Buffers(nn.Module):
    """Large buffers, one of them not in the state dict, both written by the forward."""

    seen: Tensor
    table: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = layers(3)
        self.register_buffer("seen", torch.zeros(WIDTH, WIDTH))
        self.register_buffer("table", torch.randn(2 * WIDTH, WIDTH) / 8, persistent=False)
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen.mul_(0.9).add_(x.t() @ x)
            self.count.add_(1)
        self.table = self.table.roll(1, 0)
        return cast(Tensor, self.body(x @ self.table[:WIDTH] + x @ self.seen))


class Aliased(nn.Module):
    """A buffer that views a parameter: it shows what the optimizer does."""

    alias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = layers(3)
        self.register_buffer("alias", cast(nn.Linear, cast(nn.Sequential, self.body[1])[0]).weight.data)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.body(x)) @ self.alias.t()


class Decays(nn.Module):
    """A module that writes its own parameter in forward, before and after using it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        self.target = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.99)
        y = x @ self.weight + x.detach() @ self.target
        with torch.no_grad():
            self.target.lerp_(self.weight, 0.5)
        return y


def writers() -> nn.Module:
    return nn.Sequential(nn.Embedding(128, WIDTH, max_norm=0.9), layers(1), Decays(), layers(1), Decays())


class Cloner(nn.Module):
    """A parametrization that nobody else has written."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).t()


def parametrized() -> nn.Module:
    model = layers(6)
    linears = [cast(nn.Linear, cast(nn.Sequential, block)[0]) for block in model]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(linears[0])
    nn.utils.spectral_norm(linears[1])
    parametrizations.weight_norm(linears[2], dim=1)
    parametrizations.spectral_norm(linears[3])
    parametrizations.orthogonal(linears[4])
    parametrize.register_parametrization(linears[5], "weight", Cloner())
    return model


# -- control flow ------------------------------------------------------------------------------------------------------


class LayerDrop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = layers(6)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if torch.rand(()) < 0.6:
                x = F.dropout(block(x), 0.2)
        return x * 2 if x.requires_grad else cast(Tensor, self.blocks[0](x))


class Recursive(nn.Module):
    """A module that calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        self.body = layers(2)

    def forward(self, x: Tensor, depth: int = 3) -> Tensor:
        if depth == 0:
            return cast(Tensor, self.body(x))
        return torch.tanh(self(self.down(x), depth - 1) @ self.weight)


class Experts(nn.Module):
    """A mixture of experts, of which each batch reaches a few."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 6)
        self.experts = nn.ModuleList([layers(1) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        best, chosen = scores.topk(1, -1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            where = (chosen[:, 0] == i).nonzero()[:, 0]
            if len(where):
                y = y.index_add(0, where, expert(x[where]) * best[where])
        return x + y


def two_layers_of_experts() -> nn.Module:
    return nn.Sequential(Experts(), layers(1), Experts())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 48, num_layers=2, bidirectional=True, dropout=0.2)
        self.gru = nn.GRU(96, 40, batch_first=True)
        self.cell = nn.GRUCell(40, 40)
        self.head = nn.Linear(40, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, (hidden, _) = self.lstm(x)
        z, _ = self.gru(y)
        return self.head(self.cell(z[0])), hidden


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, dropout=0.1, add_bias_kv=True)
        self.cross = nn.MultiheadAttention(WIDTH, 4, kdim=32, vdim=48, batch_first=True)
        self.body = layers(1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, weights = self.attention(x, x, x)
        z, _ = self.cross(self.body(y), x[..., :32], x[..., :48])
        return z, weights


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Transformer(WIDTH, 4, 1, 1, dim_feedforward=96, dropout=0.1, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return cast(Tensor, self.inner(source, target))


@dataclass
class Output:
    hidden: Tensor
    extra: dict[str, Tensor | None]


class Outputs(nn.Module):
    """A dict, a tuple and a dataclass as outputs of modules inside each other, and a view of a weight as one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Pair()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Any]:
        pair = self.inner(x=x)
        output = Output(self.head(pair[0]), {"second": pair[1], "none": None})
        return {"output": output, "weight": self.head.weight[:2].t(), "list": [pair[0]]}


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = layers(1), layers(2)

    def forward(self, *, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


class SparseGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, WIDTH, sparse=True)
        self.bag = nn.EmbeddingBag(128, WIDTH)
        self.body = layers(2)

    def forward(self, tokens: Tensor) -> Tensor:
        return cast(Tensor, self.body(self.embedding(tokens).sum(1) + self.bag(tokens)))


def tiny_t5() -> nn.Module:
    config: Any = T5Config(vocab_size=128, d_model=WIDTH, d_kv=16, d_ff=96, num_layers=2, num_heads=4)
    config.decoder_start_token_id = 0
    return cast(nn.Module, T5ForConditionalGeneration(config).train())


def tiny_mixtral() -> nn.Module:
    model = tiny_model("mixtral", num_hidden_layers=2).train()
    model.set_experts_implementation("eager")
    return cast(nn.Module, model)
