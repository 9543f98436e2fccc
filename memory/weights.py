"""The weights of a living model as chunks: runs of bytes that parameters view, and where those bytes are now.

Note [homes are memory]
    Outside a lease a parameter shows its chunk's *home*: its own old memory, or the mapped scratch file. Both are plain
    memory with the true bytes, true shape and true strides. So whoever reads or writes a parameter by any path
    (state_dict, pickle, deepcopy, an optimizer nobody told us of, numpy) reads and changes the truth, and nothing has
    to be intercepted. Two rules keep it true:
    1. Copies of a home exist only inside a pass; `Executor.restart` drops them at its ends.
    2. What a forward writes to a leased slot is copied home when the lease ends, if a version counter shows it or the
       chunk is known to be written unseen, Note [unseen writes].
    What tensors outside the model look at does not move, Note [homes that stay] in homes.py.
    Mapped pages and direct reads agree: before a direct read the kernel writes dirty pages of the range to the file,
    and a direct write drops the range's clean ones.

Note [unseen writes]
    A write through `.data` (or numpy) inside a forward shows in no version counter. So a chunk's first lease of each
    phase compares checksums of its slot. If they differ and no counter says so, the chunk is written unseen from then
    on: every lease that ends copies all of it home. Who does not write so in that first lease (a clamp that changes
    nothing yet), and does in a later one, is not seen: what he writes to a slot is lost with the lease.

Note [parameters that are away]
    `p.data = other` makes a parameter leave its home, and torch tells nobody. New values are copied home, and shown
    from there, if nobody can tell the difference: no one else looks at the new tensor, no one else at the home (a
    backup of the old values, the other half of a tie), and no graph will go backward with the old values. Else the
    parameter is *away*: its module computes on what it shows, which is memory of the user's own, until that changes.

Note [one chunk, one run of bytes]
    A chunk is a connected run of bytes of one storage; two parameters that overlap (tied by storage, views of one
    buffer) are views of the same chunk. It keeps its address modulo 64 wherever it goes: the bits of fp32 matrix-vector
    products depend on it.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from hetero.io.arena import PAGE_NBYTES, round_up
from hetero.io.extent import Extent
from hetero.memory.chunk import Chunk, Segment

ALIGNMENT_NBYTES = 64


class Place(Enum):
    """Where a chunk's home is."""

    FIRST = "first"
    """Memory of the tier that computes: its modules need no lease."""
    CPU = "cpu"
    """RAM, behind a gpu tier."""
    DISK = "disk"
    """An extent of the scratch file, mapped."""


@dataclass(frozen=True, slots=True)
class View:
    """How a parameter looks at its chunk. `offset` is in bytes, `stride` in elements."""

    parameter: nn.Parameter
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class WeightChunk:
    """One run of bytes and the parameters that view it.

    `base` is the home as uint8, shape (nbytes,); `home` the parameters' views of it, in the order of `views`.
    """

    def __init__(self, chunk_id: int, name: str, base: Tensor, views: Sequence[View]) -> None:
        self.chunk_id, self.name = chunk_id, name
        self.base, self.views = base, list(views)
        self.nbytes = base.numel()
        self.residue = base.data_ptr() % ALIGNMENT_NBYTES
        self._address = base.data_ptr()
        self.place = Place.FIRST
        self.extent: Extent | None = None
        self.num_open = 0
        self.is_written_unseen = False
        self.phases_checked: set[str] = set()  # in which it is known whether it is
        self.version = 0  # of the home that copies were made from
        self.home = self.views_of(base)
        self.away: frozenset[int] = frozenset()  # views whose parameters show something else
        self._references: set[weakref.ref[object]] = set()  # to saved tensors that refer to it
        self._bound: list[tuple[Tensor, int]] = []
        self._content: tuple[Tensor, int] | None = None  # a leased slot's bytes, and their checksum when it began

    @property
    def slot_nbytes(self) -> int:
        """Room for the bytes at their address modulo 64, in pages."""
        return round_up(self.residue + self.nbytes, PAGE_NBYTES)

    @property
    def host_range(self) -> tuple[int, int]:
        """What a copy to a slot takes: the bytes and what shares a 64-byte line with them, which is in the same
        page."""
        return self.base.data_ptr() - self.residue, round_up(self.residue + self.nbytes, ALIGNMENT_NBYTES)

    def chunk(self) -> Chunk:
        """The chunk as the executor moves it. Its file range is that of the extent, if it has one."""
        extent = self.extent
        segments = (Segment(extent.path, extent.offset, self.slot_nbytes, 0),) if extent is not None else ()
        return Chunk(self.chunk_id, self.name, self.slot_nbytes, self.slot_nbytes, segments, ())

    def in_slot(self, slot: Tensor) -> Tensor:
        """The chunk's bytes of a slot that holds it."""
        return slot[self.residue : self.residue + self.nbytes]

    def views_of(self, base: Tensor) -> list[Tensor]:
        """The parameters' views of these bytes; each has a version counter of its own."""
        with torch.inference_mode(False):
            return [view_bytes(base, v.offset, v.shape, v.stride, v.dtype) for v in self.views]

    def counter(self) -> int:
        """Rises with every write to a parameter that torch can see."""
        return sum(view.parameter._version for view in self.views)

    @property
    def num_own_holders(self) -> int:
        """How many tensors on the home's storage are the chunk's: `base`, `home`, and the parameters that show it."""
        return 1 + len(self.views) + (len(self.views) - len(self.away) if self.num_open == 0 else 0)

    @property
    def is_elsewhere(self) -> bool:
        """Whether `share_memory()` took the home's storage elsewhere, with all that look at it. It stays there."""
        return self.base.data_ptr() != self._address

    @property
    def trainable_nbytes(self) -> int:
        """Of the gradients that its parameters can get."""
        parameters = [view.parameter for view in self.views]
        return sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)

    def refer(self, saved: object) -> None:
        """Know of a saved tensor that means this chunk, as long as it lives. Its end is noted in C alone, so that an
        interrupt has no line of Python to be lost in."""
        reference = weakref.ref(saved, self._references.discard)
        self._references.add(reference)  # which makes the hash that its end needs

    def show_home(self) -> None:
        self._show(self.home)

    def rehome(self, base: Tensor, place: Place) -> None:
        """Make `base`, which holds the bytes already, the home. The old one dies with its last alias."""
        home, address = self.views_of(base), base.data_ptr()
        if self.num_open == 0:
            self._show(home)
        # An interrupt comes at a call, so none falls amid these.
        self.base, self.home, self.place, self._address = base, home, place, address

    def open(self, slot: Sequence[Tensor], content: Tensor | None = None) -> None:
        """Show leased bytes. Leases nest. No parameter may be away. `content`: all bytes of the slot, to see
        unseen writes by, Note [unseen writes]."""
        self.num_open += 1
        if self.num_open == 1 and content is not None:
            self._content = content, _checksum(content)
        if self.num_open == 1:
            self._show(slot)
            self._bound = [(t, v.parameter._version) for t, v in zip(slot, self.views, strict=True)]

    def close(self) -> bool:
        """End one `open`; what was written meanwhile goes home with the last. True: it is known now whether the chunk
        is written unseen."""
        self.num_open -= 1
        if self.num_open:
            return False
        is_known = self._look_for_unseen_writes()
        is_complete = self._bring_home()
        self._bound = []
        if self.is_written_unseen:
            self.version = -1  # copies that were made ahead are of the old values
        if not is_complete:
            self.adopt()
        return is_known

    def _bring_home(self) -> bool:
        """Show the home again, with what was written to the slot. False: a parameter shows something of the user's."""
        is_complete = True
        with torch.no_grad(), torch.inference_mode(False):
            for view, (slot, version), home in zip(self.views, self._bound, self.home, strict=False):
                parameter = view.parameter
                if parameter.data_ptr() != slot.data_ptr() or not view_matches(parameter, view):
                    is_complete = False
                    continue
                if parameter._version != version or self.is_written_unseen:
                    home.copy_(parameter.data)
                parameter.data = home
        return is_complete

    def _look_for_unseen_writes(self) -> bool:
        """False: nobody looked, or a write that was seen hides whether there was another."""
        if self._content is None:
            return False
        (content, checksum), self._content = self._content, None
        if _checksum(content) == checksum:
            return True
        if any(view.parameter._version != version for view, (_, version) in zip(self.views, self._bound, strict=True)):
            return False
        self.is_written_unseen = True
        return True

    def end_leases(self) -> None:
        """Show the home, after an interrupt: nobody else ends the leases. What was written to them comes home."""
        if self.num_open == 0:
            return
        is_bound = len(self._bound) == len(self.views)  # or the interrupt came before
        self._bring_home()
        self.num_open, self.version = 0, -1
        self._bound, self._content = [], None
        if not is_bound:
            self.show_home()

    def let_go(self) -> None:
        """The wrap has ended: look at the memory no more, so that another does not take this for a stranger's look.
        Saved tensors that refer to it keep it."""
        if not self._references:
            self.base, self.home = self.base.new_empty(0), []
            self._address = self.base.data_ptr()

    def adopt(self, is_private: Callable[[nn.Parameter], bool] | None = None) -> bool:
        """See what the parameters show, and take new values home where that is right, Note [parameters that are away].

        True: all of them show the home. Inside a lease nothing is changed. `is_private(p)`: nobody else looks at what
        `p` shows; by default, whether its storage has no other holder.
        """
        if self.num_open:
            return True
        if self.is_elsewhere:
            self.away = frozenset(range(len(self.views)))
            return False
        self.away = frozenset(
            i
            for i, (view, home) in enumerate(zip(self.views, self.home, strict=True))
            if view.parameter.data_ptr() != home.data_ptr() or not view_matches(view.parameter, view)
        )
        # Of several parameters that share the bytes, one that was replaced shares them no more.
        if (
            self.away
            and len(self.views) == 1
            and not self._references
            and num_holders(self.base) == self.num_own_holders
        ):
            (view,), (home,) = self.views, self.home
            is_private = is_private or (lambda parameter: num_holders(parameter) == 1)
            if view_matches(view.parameter, view) and is_private(view.parameter):
                self.version = -1  # copies that were made ahead are of the old values
                with torch.no_grad(), torch.inference_mode(False):
                    home.copy_(view.parameter.data)
                    view.parameter.data = home
                self.away = frozenset()
        return not self.away

    def _show(self, tensors: Sequence[Tensor]) -> None:
        with torch.inference_mode(False):
            for i, (view, tensor) in enumerate(zip(self.views, tensors, strict=True)):
                if i not in self.away:
                    view.parameter.data = tensor


def num_holders(tensor: Tensor) -> int:
    """How many tensors look at a tensor's storage, itself included."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) - 1  # less the storage's Python object


def _checksum(content: Tensor) -> int:
    return zlib.crc32(content.cpu().numpy().data)


def view_matches(parameter: nn.Parameter, view: View) -> bool:
    """Whether a parameter still has the geometry that it had."""
    return (
        type(parameter.data) is Tensor
        and parameter.dtype == view.dtype
        and parameter.shape == view.shape
        and parameter.stride() == view.stride
    )


def view_bytes(base: Tensor, offset: int, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor over `base` (uint8, 1-D) from byte `offset` on, with a version counter of its own."""
    start = base.storage_offset() + offset
    assert start % dtype.itemsize == 0, f"{start} is not a multiple of {dtype.itemsize}"
    empty = torch.empty(0, dtype=dtype, device=base.device)
    return empty.set_(base.untyped_storage(), start // dtype.itemsize, tuple(shape), tuple(stride))


# -- finding them ------------------------------------------------------------------------------------------------------


def find_chunks(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    device: torch.device,
    *,
    small_nbytes: int,
    buffers: Iterable[Tensor] = (),
) -> list[WeightChunk]:
    """The runs of bytes that may move, in the order of the parameters.

    What is smaller than `small_nbytes`, has no bytes of its own on `device` (meta, sparse, a tensor subclass), or is
    shared with another process or with one of the `buffers`, stays where it is.
    """
    held: dict[int, list[tuple[int, int]]] = {}
    for buffer in buffers:
        if buffer.layout is torch.strided and buffer.numel():
            held.setdefault(buffer.untyped_storage().data_ptr(), []).append(span_of(buffer))
    spans: dict[int, list[tuple[int, int, str, nn.Parameter]]] = {}
    seen: set[int] = set()
    order: dict[int, int] = {}
    for name, parameter in named_parameters:
        if id(parameter) in seen or not _can_move(parameter, device):
            continue
        seen.add(id(parameter))
        order[id(parameter)] = len(order)
        start, end = span_of(parameter)
        spans.setdefault(parameter.untyped_storage().data_ptr(), []).append((start, end, name, parameter))
    runs: list[tuple[int, str, Tensor, list[View]]] = []
    for members in spans.values():
        for start, end, group in _connected(members):
            name, first = group[0]
            if end - start < small_nbytes:
                continue
            offsets = [span_of(parameter)[0] - start for _, parameter in group]
            if any(o % p.element_size() for o, (_, p) in zip(offsets, group, strict=True)):
                continue
            if any(low < end and start < high for low, high in held.get(first.untyped_storage().data_ptr(), ())):
                continue
            empty = torch.empty(0, dtype=torch.uint8, device=device)
            base = empty.set_(first.untyped_storage(), start, (end - start,), (1,))
            if base.data_ptr() % ALIGNMENT_NBYTES % max(p.element_size() for _, p in group):
                continue
            views = [
                View(parameter, offset, parameter.shape, parameter.stride(), parameter.dtype)
                for offset, (_, parameter) in zip(offsets, group, strict=True)
            ]
            runs.append((min(order[id(parameter)] for _, parameter in group), name, base, views))
    runs.sort(key=lambda run: run[0])
    return [WeightChunk(i, name, base, views) for i, (_, name, base, views) in enumerate(runs)]


def span_of(tensor: Tensor) -> tuple[int, int]:
    """First byte and end of what a strided tensor covers of its storage."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    if tensor.is_contiguous():
        return start, start + tensor.numel() * tensor.element_size()
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (reach + 1) * tensor.element_size()


def _can_move(parameter: nn.Parameter, device: torch.device) -> bool:
    data = parameter.data
    return (
        type(data) is Tensor
        and data.layout is torch.strided
        and data.device == device
        and data.numel() > 0
        and not data.is_inference()
        and not data.untyped_storage().is_shared()
        and not data.is_conj()
        and not data.is_neg()
    )


def _connected(
    members: list[tuple[int, int, str, nn.Parameter]],
) -> list[tuple[int, int, list[tuple[str, nn.Parameter]]]]:
    """Runs of overlapping spans of one storage."""
    key: Callable[[tuple[int, int, str, nn.Parameter]], tuple[int, int]] = lambda member: member[:2]  # noqa: E731
    runs: list[tuple[int, int, list[tuple[str, nn.Parameter]]]] = []
    for start, end, name, parameter in sorted(members, key=key):
        if runs and start < runs[-1][1]:
            first, last, group = runs[-1]
            runs[-1] = (first, max(last, end), [*group, (name, parameter)])
        else:
            runs.append((start, end, [(name, parameter)]))
    return runs
