"""An alias keeps its residency alive by every path torch knows; a placeholder is NaN to read and faults on write."""

from __future__ import annotations

import gc
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from hetero.memory import residency
from hetero.memory.residency import Placeholder, alias, alias_dlpack

CPU = torch.device("cpu")
NBYTES = 4096


class Slot:
    """Foreign memory with one alias over it, and a count of deaths."""

    def __init__(self, make: Callable[..., torch.Tensor]) -> None:
        self.memory = np.arange(NBYTES, dtype=np.int64).astype(np.uint8)
        self.deaths: deque[int] = deque()
        on_death = partial(self.deaths.append, 1)  # holds the queue, never the tensor
        self.tensor: torch.Tensor | None = make(self.memory.ctypes.data, NBYTES, CPU, on_death)


@pytest.fixture(params=[alias, alias_dlpack], ids=["numpy", "dlpack"])
def slot(request: pytest.FixtureRequest) -> Slot:
    return Slot(request.param)


def test_alias_is_the_foreign_memory(slot: Slot) -> None:
    tensor = slot.tensor
    assert tensor is not None
    assert tensor.dtype == torch.uint8
    assert tensor.shape == (NBYTES,)
    assert tensor.untyped_storage().data_ptr() == slot.memory.ctypes.data
    assert tensor.untyped_storage().nbytes() == NBYTES
    slot.memory[7] = 99
    assert tensor[7] == 99
    tensor[8] = 98
    assert slot.memory[8] == 98


KEEPERS: dict[str, Callable[[torch.Tensor], object]] = {
    "view": lambda t: t[16:32],
    "dtype_view": lambda t: t[16:144].view(torch.float32).view(4, 8).t(),
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "parameter": lambda t: torch.nn.Parameter(t.view(torch.float32)),
    "parameter_data": lambda t: _assign_data(t.view(torch.float32)),
    "numpy": lambda t: t.numpy(),
    "numpy_view": lambda t: t.numpy()[3:9],
    "memoryview": lambda t: t.numpy().data,
    "storage": lambda t: t.untyped_storage(),
    "dlpack": lambda t: t.__dlpack__(),
    "saved_by_autograd": lambda t: torch.ones(1024, requires_grad=True) * t.view(torch.float32),
}


def _assign_data(tensor: torch.Tensor) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.empty(0))
    parameter.data = tensor
    return parameter


@pytest.mark.parametrize("keeper", KEEPERS, ids=str)
def test_alias_lives_as_long_as_any_user(slot: Slot, keeper: str) -> None:
    assert slot.tensor is not None
    kept = KEEPERS[keeper](slot.tensor)
    slot.tensor = None
    gc.collect()
    assert len(slot.deaths) == 0
    del kept
    assert len(slot.deaths) == 1
    gc.collect()
    assert len(slot.deaths) == 1


def test_death_is_seen_from_another_thread(slot: Slot) -> None:
    box = [slot.tensor]
    slot.tensor = None
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert len(slot.deaths) == 1


def test_each_residency_of_one_slot_dies_by_itself(slot: Slot) -> None:
    second_deaths: deque[int] = deque()
    second = alias(slot.memory.ctypes.data, NBYTES, CPU, lambda: second_deaths.append(1))
    slot.tensor = None
    assert (len(slot.deaths), len(second_deaths)) == (1, 0)
    del second
    assert (len(slot.deaths), len(second_deaths)) == (1, 1)


def test_a_failed_dlpack_import_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(residency._KDL_DEVICE, "cpu", 99)  # a device torch does not know
    deaths: deque[int] = deque()
    memory = np.zeros(NBYTES, np.uint8)
    with pytest.raises(Exception, match=r"(?i)device"):
        alias_dlpack(memory.ctypes.data, NBYTES, CPU, lambda: deaths.append(1))
    assert len(deaths) == 1


FLOATS = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: str(d).removeprefix("torch."))
def test_placeholder_is_nan_everywhere(dtype: torch.dtype) -> None:
    placeholder = Placeholder(5 << 20)
    numel = (5 << 20) // dtype.itemsize
    tensor = placeholder.tensor((numel,), (1,), dtype)
    assert torch.isnan(tensor.to(torch.float32)).all()


def test_placeholder_keeps_geometry() -> None:
    placeholder = Placeholder(1 << 20)
    plain = torch.empty(2, 8, 4, 4).to(memory_format=torch.channels_last)
    tensor = placeholder.tensor(plain.shape, plain.stride(), plain.dtype)
    assert tensor.shape == plain.shape
    assert tensor.stride() == plain.stride()
    assert tensor.is_contiguous(memory_format=torch.channels_last)
    assert tensor._base is None
    assert placeholder.holds(tensor) and placeholder.holds(tensor[1].detach().permute(1, 2, 0))
    assert not placeholder.holds(plain)
    assert placeholder.tensor((), (), torch.float32).isnan()
    assert placeholder.tensor((0, 3), (3, 1), torch.float32).numel() == 0


def test_placeholder_refuses_a_tensor_beyond_its_region() -> None:
    placeholder = Placeholder(4096)
    with pytest.raises(RuntimeError, match="not resizable"):
        placeholder.tensor((1025,), (1,), torch.float32)


def test_placeholder_takes_one_block_of_memory_whatever_its_size() -> None:
    placeholder = Placeholder(64 << 20)
    tensor = placeholder.tensor((16 << 20,), (1,), torch.float32)
    assert torch.isnan(tensor).all()  # every page is touched
    assert _pss_nbytes(placeholder.address, 64 << 20) <= 3 << 20


def test_placeholder_is_unmapped_after_the_last_tensor() -> None:
    placeholder = Placeholder(8 << 20)
    address = placeholder.address
    tensor = placeholder.tensor((4,), (1,), torch.float32)
    del placeholder
    assert tensor.isnan().all()
    assert _is_mapped(address)
    del tensor
    assert not _is_mapped(address)


WRITES = {
    "fill": "t.fill_(0.0)",
    "element": "t[1000] = 1.0",
    "fused_adamw": "p = torch.nn.Parameter(t); p.grad = torch.zeros_like(p);torch.optim.AdamW([p], fused=True).step()",
    "numpy": "t.numpy()[5] = 1",
}


@pytest.mark.parametrize("write", WRITES, ids=str)
def test_a_write_to_a_placeholder_faults(write: str) -> None:
    code = (
        "import resource, torch; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "from hetero.memory.residency import Placeholder\n"
        "t = Placeholder(3 << 20).tensor((4096,), (1,), torch.float32)\n"
        f"{WRITES[write]}\nprint('survived')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert "survived" not in done.stdout
    assert done.returncode == -signal.SIGSEGV, done.stderr


def _is_mapped(address: int) -> bool:
    return any(start == address for start, _, _ in _mappings())


def _pss_nbytes(address: int, nbytes: int) -> int:
    return sum(pss for start, _, pss in _mappings() if address <= start < address + nbytes)


def _mappings() -> list[tuple[int, int, int]]:
    """Return (start, end, pss_nbytes) of every mapping of this process."""
    found: list[tuple[int, int, int]] = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = re.match(r"^([0-9a-f]+)-([0-9a-f]+) ", line)
        if head:
            found.append((int(head[1], 16), int(head[2], 16), 0))
        elif line.startswith("Pss:"):
            start, end, _ = found[-1]
            found[-1] = (start, end, int(line.split()[1]) << 10)
    return found
