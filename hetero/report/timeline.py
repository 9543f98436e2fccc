"""Write a run's history as Chrome trace JSON, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetero.io.errors import ConfigError

_PROCESS_ID = 1


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work in one lane. Times are seconds on any common clock; `args` must be JSON values."""

    name: str
    lane: str
    start_s: float
    end_s: float
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CounterSample:
    """Values that hold from `time_s` on, drawn stacked under `name` (bytes per holder, say)."""

    name: str
    time_s: float
    values: Mapping[str, float]


def chrome_trace(spans: Iterable[Span], counters: Iterable[CounterSample] = ()) -> dict[str, Any]:
    """Return the trace as a JSON object: events ordered by time, starting at 0, lanes in order of first use.

    Spans of one lane that overlap without nesting (transfers in flight together) are spread over further rows of
    the same name, because the format draws one row as a stack. Raises ValueError for a span that ends before it starts.
    """
    # Of two spans that start together the longer one encloses the other, so it must come first.
    ordered = sorted(spans, key=lambda span: (span.start_s, -span.end_s))
    samples = sorted(counters, key=lambda sample: sample.time_s)
    first_times = [span.start_s for span in ordered[:1]] + [sample.time_s for sample in samples[:1]]
    origin_s = min(first_times, default=0.0)
    rows = _Rows()
    events = [_span_event(span, rows.place(span), origin_s) for span in ordered]
    events += [_counter_event(sample, origin_s) for sample in samples]
    events.sort(key=lambda event: event["ts"])  # stable: keeps enclosing spans before the enclosed
    return {"traceEvents": [*rows.name_events(), *events], "displayTimeUnit": "ms"}


def write_timeline(path: str | os.PathLike[str], spans: Iterable[Span], counters: Iterable[CounterSample] = ()) -> None:
    """Write the trace to `path`, replacing what is there. Blocks; raises ConfigError when there is no such folder, and
    OSError as open() does."""
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"the trace cannot be written to {os.fspath(path)!r}: there is no folder {folder}")
    trace = chrome_trace(spans, counters)
    Path(path).write_text(json.dumps(trace, allow_nan=False, separators=(",", ":")) + "\n", encoding="utf-8")


class _Rows:
    """Gives each span a row (a trace thread) in which it nests properly."""

    def __init__(self) -> None:
        self._lane_of_row: list[str] = []
        self._open_ends_of_row: list[list[float]] = []

    def place(self, span: Span) -> int:
        """Return the row id of a span; spans must come in order of start."""
        if span.end_s < span.start_s:
            raise ValueError(f"span {span.name!r} ends at {span.end_s} s, before its start at {span.start_s} s")
        for row, lane in enumerate(self._lane_of_row):
            if lane != span.lane:
                continue
            open_ends = self._open_ends_of_row[row]
            while open_ends and open_ends[-1] <= span.start_s:
                open_ends.pop()
            if not open_ends or span.end_s <= open_ends[-1]:
                open_ends.append(span.end_s)
                return row
        self._lane_of_row.append(span.lane)
        self._open_ends_of_row.append([span.end_s])
        return len(self._lane_of_row) - 1

    def name_events(self) -> list[dict[str, Any]]:
        """Return the metadata events that name the rows and keep those of a lane together."""
        lanes = list(dict.fromkeys(self._lane_of_row))
        events: list[dict[str, Any]] = []
        for row, lane in enumerate(self._lane_of_row):
            common = {"ph": "M", "pid": _PROCESS_ID, "tid": row}
            events.append({**common, "name": "thread_name", "args": {"name": lane}})
            events.append({**common, "name": "thread_sort_index", "args": {"sort_index": lanes.index(lane)}})
        return events


def _span_event(span: Span, row: int, origin_s: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.lane,
        "pid": _PROCESS_ID,
        "tid": row,
        "ts": _microseconds(span.start_s - origin_s),
        "dur": _microseconds(span.end_s - span.start_s),
        "args": dict(span.args),
    }


def _counter_event(sample: CounterSample, origin_s: float) -> dict[str, Any]:
    return {
        "ph": "C",
        "name": sample.name,
        "pid": _PROCESS_ID,
        "ts": _microseconds(sample.time_s - origin_s),
        "args": dict(sample.values),
    }


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
