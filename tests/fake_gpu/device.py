"""Builds and loads the fake GPU (fake_gpu.cpp), and puts the memory of hetero's emulated device on it."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import shutil
import subprocess
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from hetero.memory.device_emulated import EmulatedDevice

SOURCE = Path(__file__).with_name("fake_gpu.cpp")
CACHE = Path(__file__).resolve().parents[2] / ".cache" / "fake_gpu"
DEVICE = torch.device("xpu", 0)


def can_load() -> bool:
    """Whether there is a compiler, and no GPU that torch knows already."""
    return shutil.which("g++") is not None and not torch.cuda.is_available() and torch.version.xpu is None


@cache
def load() -> ctypes.CDLL:
    """Build it if that was not done, some ten seconds, and load it: before torch has looked for an XPU, which it does
    once. Raises RuntimeError with what the compiler said."""
    library = _built()
    torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    torch.xpu._lazy_init = lambda: None  # its Python half has nothing to start
    torch.xpu.get_rng_state = lambda device=None: torch.get_rng_state()  # it draws what the CPU would
    torch.xpu.set_rng_state = lambda new_state, device=None: torch.set_rng_state(new_state)
    return ctypes.CDLL(str(library))


def show(is_shown: bool) -> None:
    """Let torch's autograd and torch.accelerator see the device, or not."""
    load().fake_gpu_show(ctypes.c_bool(is_shown))


def emulated_on_it(emulated: type[EmulatedDevice]) -> Any:
    """The emulated device, with tensors that torch takes for a GPU's."""
    return partial(emulated, torch_device=DEVICE)


def _built() -> Path:
    folder = Path(torch.__file__).parent
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = CACHE / f"fake_gpu-{key}.so"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            include = folder / "include"
            half_made = library.with_suffix(".part")
            command = [
                "g++",
                "-O0",
                "-std=c++20",
                "-shared",
                "-fPIC",
                f"-I{include}",
                str(SOURCE),
                "-o",
                str(half_made),
            ]
            command += [
                f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}",
                f"-L{folder / 'lib'}",
                "-ltorch_cpu",
                "-lc10",
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"the fake GPU cannot be built:\n{done.stderr}")
            half_made.rename(library)
    return library
