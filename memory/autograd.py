"""What autograd keeps for backward, kept as little as can be: weights by reference, activations where there is room.

Note [what a saved tensor becomes]
    autograd saves storages, not names: `x @ w.t()` saves a view of the weight's slot. While a pass with gradients runs,
    every tensor it saves passes `pack`:
    - a view of a chunk, in a slot or at home: a `WeightRef` (chunk, offset, shape, stride, dtype). Backward leases the
      chunk again, and the view it gets keeps the slot by its life;
    - a cast copy of a weight (autocast): a `CastRef`, cast again in backward from the same bytes;
    - a small tensor, a parameter or a buffer, a part of larger data that was there before (a batch of a data set):
      itself, detached (returning the tensor itself would leak it when no backward follows);
    - anything else: an `Activation`, whose bytes the ledger counts and the store may move (activations.py).
    Hooks switch torch's own in-place check off, so each of these checks the version counter, with torch's error.
    A tensor packed under foreign hooks (save_on_cpu, non-reentrant checkpointing), inside the pass or around it, never
    comes here: it then aliases a slot, which is not reused as long as it lives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from hetero.memory.activations import Activation, ActivationStore
from hetero.memory.unseen import unseen
from hetero.memory.weights import View, WeightChunk, span_of, view_bytes

SMALL_NBYTES = 4096
"""A saved tensor smaller than this is neither counted nor moved."""

# torch's stack of saved-tensor hooks; its `saved_tensors_hooks` takes off what is on top, whosever that is.
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks


class Packed(Protocol):
    """What autograd holds in the place of a tensor."""

    def unpack(self) -> Tensor: ...


@cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.empty(0, dtype=dtype, device=device)


class Version:
    """A version counter without the memory: whether a tensor was changed in place since."""

    __slots__ = ("_probe", "_then")

    def __init__(self, tensor: Tensor) -> None:
        self._then = tensor._version
        self._probe = tensor.detach()
        self._probe.data = _nothing(tensor.dtype, tensor.device)  # keeps the counter only

    def check(self) -> None:
        """Raise what torch raises."""
        if self._probe._version != self._then:
            raise _modified(self._probe, self._probe._version, self._then)


def _modified(tensor: Tensor, now: int, then: int) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()}] is at version {now}; expected version {then} instead"
    )


class Plain:
    """A tensor that stays where it is."""

    __slots__ = ("_tensor", "_then")

    def __init__(self, tensor: Tensor) -> None:
        detached = tensor.detach()  # shares the version counter
        if type(tensor) is not type(detached) and not isinstance(tensor, torch.nn.Parameter):
            detached = detached.as_subclass(type(tensor))
        self._tensor = detached
        self._then = tensor._version

    def unpack(self) -> Tensor:
        if self._tensor._version != self._then:
            raise _modified(self._tensor, self._tensor._version, self._then)
        return self._tensor


class WeightRef:
    """A view of a chunk, wherever the chunk is."""

    __slots__ = ("__weakref__", "_chunk", "_dtype", "_leases", "_offset", "_shape", "_stride", "_version")

    def __init__(self, chunk: WeightChunk, offset: int, tensor: Tensor, leases: Leases) -> None:
        self._chunk, self._offset, self._leases = chunk, offset, leases
        chunk.refer(self)
        self._shape, self._stride, self._dtype = tensor.shape, tensor.stride(), tensor.dtype
        self._version = Version(tensor)

    def unpack(self) -> Tensor:
        self._version.check()
        return self._leases.view(
            self._chunk, lambda base: view_bytes(base, self._offset, self._shape, self._stride, self._dtype)
        )


class CastRef:
    """A weight in autocast's dtype."""

    __slots__ = ("__weakref__", "_chunk", "_dtype", "_is_transposed", "_leases", "_version", "_view")

    def __init__(self, chunk: WeightChunk, view: View, tensor: Tensor, is_transposed: bool, leases: Leases) -> None:
        self._chunk, self._view, self._leases = chunk, view, leases
        chunk.refer(self)
        self._dtype, self._is_transposed = tensor.dtype, is_transposed
        self._version = Version(view.parameter)

    def unpack(self) -> Tensor:
        self._version.check()
        view = self._view

        def cast(base: Tensor) -> Tensor:
            weight = view_bytes(base, view.offset, view.shape, view.stride, view.dtype)
            with torch.no_grad(), torch.autocast(base.device.type, enabled=False):
                return weight.to(self._dtype)

        weight = self._leases.view(self._chunk, cast)
        return weight.t() if self._is_transposed else weight


class Lazy:
    """A tensor that torch will conjugate or negate when it is read: its bytes are packed as they are."""

    __slots__ = ("_is_conj", "_is_neg", "_packed")

    def __init__(self, packed: Packed, is_conj: bool, is_neg: bool) -> None:
        self._packed, self._is_conj, self._is_neg = packed, is_conj, is_neg

    def unpack(self) -> Tensor:
        tensor = self._packed.unpack()
        if self._is_conj:
            tensor = tensor.conj()
        return torch._neg_view(tensor) if self._is_neg else tensor


def _with_flags(packed: Packed, tensor: Tensor) -> Packed:
    if tensor.is_conj() or tensor.is_neg():
        return Lazy(packed, tensor.is_conj(), tensor.is_neg())
    return packed


class Leases(Protocol):
    """Who answers for the chunks: the run."""

    def is_inside_pass(self) -> bool:
        """Whether this thread is in a forward of the model."""

    def begin_backward(self) -> None:
        """Something saved is asked for: the first time in a backward, that backward begins."""

    def view(self, chunk: WeightChunk, make: Callable[[Tensor], Tensor]) -> Tensor:
        """`make(base)` of the chunk's bytes as uint8, leased meanwhile; what it returns may alias them for ever."""

    def find(self, tensor: Tensor) -> tuple[WeightChunk, int] | None:
        """The chunk that a tensor's storage belongs to, and the tensor's first byte in it."""

    def computing(self) -> Sequence[WeightChunk]:
        """The chunks of the modules whose forward runs now."""

    def is_persistent(self, tensor: Tensor) -> bool:
        """Whether it is a parameter or a buffer of the model that never moves."""


class SavedTensors:
    """The pair of hooks. `leases` answers for weights, `activations` for everything else."""

    def __init__(self, leases: Leases, activations: ActivationStore) -> None:
        self._leases, self._activations = leases, activations

    def pack(self, tensor: Tensor) -> Packed:
        with unseen():
            return self._pack(tensor)

    def _pack(self, tensor: Tensor) -> Packed:
        if type(tensor) is not Tensor and not isinstance(tensor, torch.nn.Parameter):
            return Plain(tensor)
        if not self._leases.is_inside_pass():  # an interrupted pass has left the hooks on its thread
            return Plain(tensor)
        if not _has_memory(tensor):
            return Plain(tensor)
        found = self._leases.find(tensor)
        if found is not None:
            return _with_flags(WeightRef(*found, tensor, self._leases), tensor)
        if tensor.numel() * tensor.element_size() < SMALL_NBYTES or self._leases.is_persistent(tensor):
            return Plain(tensor)
        if tensor.dtype in (torch.bfloat16, torch.float16):  # torch says autocast is off inside a cast operation
            cast = self._cast_of(tensor)
            if cast is not None:
                return cast
        if _is_part_of_data(tensor):
            return Plain(tensor)
        return _with_flags(self._activations.add(tensor, Version(tensor)), tensor)

    def unpack(self, packed: Packed | Activation) -> Tensor:
        with unseen():
            self._leases.begin_backward()
            return packed.unpack()

    def _cast_of(self, tensor: Tensor) -> CastRef | None:
        """A weight of the running module, cast by autocast. Recognised by its bits, so it cannot be taken for
        another."""
        with torch.no_grad(), torch.autocast(tensor.device.type, enabled=False):
            plain = tensor.detach()
            for chunk in self._leases.computing():
                for view in chunk.views:
                    if view.dtype == tensor.dtype or view.parameter.numel() != plain.numel():
                        continue
                    weight = view.parameter.detach()
                    for is_transposed in (False, True) if plain.dim() == 2 else (False,):
                        same = plain.t() if is_transposed else plain
                        if same.shape != weight.shape or same.stride() != weight.stride():
                            continue
                        if torch.equal(same, weight.to(tensor.dtype)):
                            return CastRef(chunk, view, tensor, is_transposed, self._leases)
        return None


def _has_memory(tensor: Tensor) -> bool:
    """Whether a tensor is a run of bytes and nothing cleverer."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor._is_zerotensor()
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and tensor.numel() > 0
    )


def _is_part_of_data(tensor: Tensor) -> bool:
    """Whether a tensor shows a lesser part of memory that no differentiable operation made: it is not ours to count."""
    start, end = span_of(tensor)
    return tensor.grad_fn is None and 2 * (end - start) < tensor.untyped_storage().nbytes()


class Interception:
    """A pair of hooks on this thread's stack, from `enter` to `leave`, whatever comes onto the stack meanwhile.

    Only the topmost pair is asked. So where another's is on top already, it stays the only one: it is asked what it
    would be asked plainly (it may keep bfloat16 copies, or count to compute again).
    """

    def __init__(self, saved: SavedTensors) -> None:
        self._pair = saved.pack, saved.unpack
        self._is_entered = False

    def enter(self) -> None:
        top = _top_hooks(True)
        if top is not None and not isinstance(getattr(top[0], "__self__", None), SavedTensors):
            return
        self._is_entered = True  # first, so that `leave` looks for the pair whatever call an interrupt hit
        # RuntimeError inside disable_saved_tensors_hooks: aliases keep slots by themselves.
        with suppress(RuntimeError):
            _push_hooks(*self._pair)

    def leave(self) -> None:
        """Take the pair off the stack and leave the others; nothing happens where it is not on it."""
        if not self._is_entered:
            return
        above = []
        while (pair := _top_hooks(True)) is not None:
            _pop_hooks()
            if pair[0] is self._pair[0]:
                break
            above.append(pair)
        for pair in reversed(above):
            _push_hooks(*pair)
        self._is_entered = False
