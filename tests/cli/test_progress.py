"""The bar on a terminal, and the one line per finished phase elsewhere, with a rate over that phase's own time."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from hetero.cli import progress
from hetero.cli.progress import ProgressView

MIB = 1 << 20


def report(phase: str, done: int) -> SimpleNamespace:
    return SimpleNamespace(phase=phase, done_nbytes=done * MIB, total_nbytes=8 * MIB, message="")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time that the view sees, in seconds."""
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: now.s))
    return now


def test_each_phase_has_one_line_and_a_transfer_its_rate(clock: SimpleNamespace) -> None:
    text = io.StringIO()
    with ProgressView(Console(file=text)) as view:
        for done, at_s in ((0, 100.0), (4, 101.0), (8, 102.0)):
            clock.s = at_s
            view(report("load", done))
        clock.s = 106.0  # the prefill's first report comes when its first piece is done
        view(report("prefill", 8))
        clock.s = 200.0
        view.stop()
        view(report("decode", 8))

    assert text.getvalue().splitlines() == [
        "load: 8.0 MiB in 2.0 s, 4.2 MB/s",
        "prefill: through 8.0 MiB of weights in 4.0 s",
    ]


def test_an_unfinished_phase_says_nothing(clock: SimpleNamespace) -> None:
    text = io.StringIO()
    with pytest.raises(KeyboardInterrupt), ProgressView(Console(file=text)) as view:
        view(report("load", 4))
        raise KeyboardInterrupt
    assert text.getvalue() == ""


def test_a_terminal_shows_a_bar_and_loses_it_at_the_end() -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=100)
    with ProgressView(console) as view:
        view(report("load", 4))
        view(report("load", 8))
    drawn = text.getvalue()
    assert "8.0/8.0 MiB" in drawn
    assert drawn.index("\x1b[?25l") < drawn.index("\x1b[?25h")  # the cursor is shown again
