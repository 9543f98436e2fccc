"""What the recorder keeps of passes, and when it says that the order is new."""

from __future__ import annotations

from hetero.memory.trace import NUM_PASSES_KEPT, Recorder


def run_pass(recorder: Recorder, order: list[tuple[int, ...]], phase: str = "decode") -> bool:
    recorder.begin(phase)
    for chunk_ids in order:
        recorder.request()
        recorder.grant("module", chunk_ids)
    return recorder.end()


def test_a_new_order_is_noticed_however_late() -> None:
    recorder = Recorder()
    assert run_pass(recorder, [(0,), (1,)])
    for _ in range(10 * NUM_PASSES_KEPT):
        assert not run_pass(recorder, [(0,), (1,)])
    assert run_pass(recorder, [(1,), (0,)])
    assert recorder.order("decode") == [(1,), (0,)]
    assert run_pass(recorder, [(1,), (0,)], phase="prefill"), "another phase has an order of its own"


def test_a_trace_has_the_last_order_and_only_passes_like_it() -> None:
    recorder = Recorder()
    run_pass(recorder, [(0,), (1,)])
    run_pass(recorder, [(1,), (0,)])
    trace = recorder.trace("decode")
    assert trace is not None
    assert [moment.chunk_ids for moment in trace.moments] == [(1,), (0,)]
    assert all(moment.compute_s >= 0 for moment in trace.moments)


def test_compute_is_settled_in_the_first_passes_only() -> None:
    calls: list[None] = []
    recorder = Recorder(lambda: calls.append(None))
    for _ in range(NUM_PASSES_KEPT):
        run_pass(recorder, [(0,), (1,)])
    assert len(calls) == 2 * 2 * NUM_PASSES_KEPT  # at both ends of both moments
    run_pass(recorder, [(0,), (1,)])
    assert len(calls) == 2 * 2 * NUM_PASSES_KEPT


def test_a_pass_that_raised_is_forgotten() -> None:
    recorder = Recorder()
    recorder.begin("decode")
    recorder.grant("module", (0,))
    recorder.abort()
    assert not recorder.end()
    assert recorder.trace("decode") is None
