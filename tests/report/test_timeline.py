"""The trace is valid JSON, in order of time, and draws overlapping work in rows that nest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.report.timeline import CounterSample, Span, chrome_trace, write_timeline


def spans_of(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def lane_names(trace: dict[str, Any]) -> dict[int, str]:
    events = [event for event in trace["traceEvents"] if event["name"] == "thread_name"]
    return {event["tid"]: event["args"]["name"] for event in events}


def test_file_holds_spans_counters_and_lanes(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    spans = [
        Span("layers.1", "compute", 10.5, 11.0),
        Span("chunk 3", "disk", 10.0, 10.25, {"nbytes": 4096}),
    ]
    write_timeline(path, spans, [CounterSample("gpu", 10.125, {"weights": 512, "kv": 64})])

    trace = json.loads(path.read_text(encoding="utf-8"))

    read, compute = spans_of(trace)
    assert (read["name"], read["ts"], read["dur"]) == ("chunk 3", 0.0, 250_000.0)
    assert read["args"] == {"nbytes": 4096}
    assert (compute["name"], compute["ts"], compute["dur"]) == ("layers.1", 500_000.0, 500_000.0)
    names = lane_names(trace)
    assert [names[read["tid"]], names[compute["tid"]]] == ["disk", "compute"]
    (counter,) = (event for event in trace["traceEvents"] if event["ph"] == "C")
    assert (counter["name"], counter["ts"], counter["args"]) == ("gpu", 125_000.0, {"weights": 512, "kv": 64})


def test_overlapping_spans_of_a_lane_take_further_rows_and_nested_ones_do_not() -> None:
    outer, inner = Span("pass", "disk", 0.0, 4.0), Span("read", "disk", 1.0, 2.0)
    crossing = Span("late", "disk", 3.0, 5.0)

    trace = chrome_trace([crossing, inner, outer])

    rows = {event["name"]: event["tid"] for event in spans_of(trace)}
    assert rows["pass"] == rows["read"] != rows["late"]
    assert set(lane_names(trace).values()) == {"disk"}


def test_a_row_is_used_again_once_it_is_free() -> None:
    trace = chrome_trace([Span("a", "disk", 0.0, 1.0), Span("b", "disk", 1.0, 2.0)])
    assert len(lane_names(trace)) == 1


def test_an_empty_history_is_an_empty_trace() -> None:
    assert chrome_trace([])["traceEvents"] == []


def test_a_span_that_ends_before_it_starts_is_refused() -> None:
    with pytest.raises(ValueError, match="'bad' ends at 1"):
        chrome_trace([Span("bad", "disk", 2.0, 1.0)])


def test_numbers_that_json_lacks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_timeline(tmp_path / "out.json", [], [CounterSample("gpu", 0.0, {"weights": float("nan")})])


_TIMES = st.integers(0, 40)


@given(st.lists(st.tuples(st.sampled_from(["disk", "gpu"]), _TIMES, _TIMES), max_size=20), st.lists(_TIMES, max_size=5))
def test_events_are_ordered_and_every_row_nests(raw: list[tuple[str, int, int]], samples: list[int]) -> None:
    spans = [Span("work", lane, start / 8, (start + length) / 8) for lane, start, length in raw]
    trace = chrome_trace(spans, [CounterSample("bytes", at / 8, {"v": at}) for at in samples])

    timed = [event for event in trace["traceEvents"] if event["ph"] in "XC"]
    assert len(timed) == len(spans) + len(samples)
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    for row in lane_names(trace):
        open_ends: list[float] = []
        for event in spans_of(trace):
            if event["tid"] != row:
                continue
            while open_ends and open_ends[-1] <= event["ts"]:
                open_ends.pop()
            end = event["ts"] + event["dur"]
            assert not open_ends or end <= open_ends[-1]
            open_ends.append(end)
