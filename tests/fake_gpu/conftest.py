"""Loads the fake GPU before any test runs, and shows it to torch during the tests of this folder alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hetero.memory import device_emulated
from tests.fake_gpu import device

device.load()


@pytest.fixture(autouse=True, scope="package")
def fake_gpu() -> Iterator[None]:
    """`device="emulated"` computes on tensors that torch takes for a GPU's."""
    plain = device_emulated.EmulatedDevice
    device.show(True)
    vars(device_emulated)["EmulatedDevice"] = device.emulated_on_it(plain)
    yield
    vars(device_emulated)["EmulatedDevice"] = plain
    device.show(False)
