"""Shows the fake GPU to torch during each module of this folder; tests/conftest.py has loaded it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hetero.memory import device_emulated
from tests.fake_gpu import device


@pytest.fixture(autouse=True, scope="module")
def fake_gpu() -> Iterator[None]:
    """`device="emulated"` computes on tensors that torch takes for a GPU's."""
    if not device.can_load():
        pytest.skip("the fake GPU needs g++ to be built, and no real one beside it")
    plain = device_emulated.EmulatedDevice
    device.show(True)
    vars(device_emulated)["EmulatedDevice"] = device.emulated_on_it(plain)
    yield
    vars(device_emulated)["EmulatedDevice"] = plain
    device.show(False)
