"""Show how far a load or a prefill is: a bar on a terminal, one line per finished phase elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from hetero.cli.render import error_console, format_nbytes, format_rate


class ProgressReport(Protocol):
    """What hetero.load tells its progress callback; sizes are bytes."""

    @property
    def phase(self) -> str: ...
    @property
    def done_nbytes(self) -> int: ...
    @property
    def total_nbytes(self) -> int: ...
    @property
    def message(self) -> str: ...


class ProgressView:
    """A progress callback that draws on stderr from entry until `stop` or exit, whichever comes first.

    May be called from any thread, but from one at a time.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or error_console()
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._phase: str | None = None
        self._done_nbytes = 0
        self._phase_start_s = 0.0
        self._last_report_s = 0.0
        self._stopped = False

    def __enter__(self) -> ProgressView:
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TransferSpeedColumn(),
                console=self._console,
                transient=True,
            )
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._phase = None  # an unfinished phase has no rate to report
        self.stop()

    def __call__(self, report: ProgressReport) -> None:
        if self._stopped or report.phase == "decode":
            return
        now_s = time.perf_counter()
        if report.phase != self._phase:
            self._finish_phase()
            # A phase may report for the first time when a part of it is done: it began where the one before ended.
            self._phase, self._phase_start_s = report.phase, self._last_report_s or now_s
            if self._bar is not None:
                self._task = self._bar.add_task(report.phase, total=None)
        self._done_nbytes, self._last_report_s = report.done_nbytes, now_s
        if self._bar is not None and self._task is not None:
            text = f"{report.phase} {report.message}".rstrip()
            self._bar.update(
                self._task, description=text, completed=report.done_nbytes, total=report.total_nbytes or None
            )

    def stop(self) -> None:
        """Stop drawing and print the last phase's line. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        if self._bar is not None:
            self._bar.stop()
        self._finish_phase()

    def _finish_phase(self) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None
        if self._phase is None:
            return
        elapsed_s = self._last_report_s - self._phase_start_s
        rate = f", {format_rate(self._done_nbytes / elapsed_s)}" if self._done_nbytes and elapsed_s > 0 else ""
        if self._phase == "prefill":  # weights that the prompt has passed, wherever they are: no disk's rate
            line = f"prefill: through {format_nbytes(self._done_nbytes)} of weights in {elapsed_s:.1f} s"
        else:
            line = f"{self._phase}: {format_nbytes(self._done_nbytes)} in {elapsed_s:.1f} s{rate}"
        self._console.print(line, style="dim", highlight=False)
        self._phase = None
