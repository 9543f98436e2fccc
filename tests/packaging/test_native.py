"""An install without compiled parts says once what it does instead."""

from __future__ import annotations

import logging
import sys

import pytest

from hetero import native


@pytest.fixture(autouse=True)
def fresh_report() -> None:
    native.report_missing_once.cache_clear()


def part(*platforms: str, module: str = "hetero.io._absent") -> native.NativePart:
    return native.NativePart(name="fast reads", module=module, reference="slow reads", platforms=platforms)


def test_a_missing_part_is_named_in_one_line_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "PARTS", (part(sys.platform),))
    caplog.set_level(logging.INFO, logger="hetero")
    native.report_missing_once()
    native.report_missing_once()
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert record.getMessage().endswith("on the reference path: fast reads (instead: slow reads)")


@pytest.mark.parametrize(
    "complete",
    [
        pytest.param((part("another-system"),), id="not for this system"),
        pytest.param((part(sys.platform, module="hetero.io.errors"),), id="present"),
    ],
)
def test_a_complete_install_is_silent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, complete: tuple[native.NativePart, ...]
) -> None:
    monkeypatch.setattr(native, "PARTS", complete)
    caplog.set_level(logging.INFO, logger="hetero")
    native.report_missing_once()
    assert not caplog.records
