"""Bad days of the disk: errors, short and late transfers, a truncated file, and a disk that never answers."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest

from hetero.io.arena import Arena
from hetero.io.backends.base import Backend, Block, Completion
from hetero.io.backends.faulty import Fault, FaultyBackend
from hetero.io.backends.probe import BackendName
from hetero.io.backends.threads import ThreadsBackend
from hetero.io.backends.uring import UringBackend
from hetero.io.engine import Engine, Request
from hetero.io.errors import IOEngineError, UnsupportedError

KIB, MIB = 1 << 10, 1 << 20
_FOREVER_S = 600.0  # a test that waits so long has failed, by its own timeout
BACKENDS: tuple[BackendName, ...] = ("io_uring", "threads", "buffered")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> BackendName:
    name: BackendName = request.param
    return name


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file.bin"
    path.write_bytes(os.urandom(MIB))
    return path


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena(2 * MIB, name="test") as arena:
        yield arena


class FaultyEngine:
    """An engine and its fault injector, as a context manager."""

    def __init__(self, backend: BackendName, fault: Callable[[Block], Fault | None], **options: Any) -> None:
        settings: dict[str, Any] = {"block_nbytes": 64 * KIB, "bounce_nbytes": 64 * KIB, **options}
        try:
            self.engine = Engine(backend=backend, wrap_backend=self._wrap, **settings)
        except UnsupportedError as error:
            pytest.skip(str(error))
        self.fault = fault

    def _wrap(self, inner: Backend) -> Backend:
        self.faulty = FaultyBackend(inner, lambda block: self.fault(block))
        return self.faulty

    def __enter__(self) -> FaultyEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.engine.close()


def at(offset: int, fault: Fault) -> Callable[[Block], Fault | None]:
    return lambda block: fault if block.offset == offset else None


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
def test_an_error_in_one_block_fails_its_request_only(
    backend: BackendName, path: Path, arena: Arena, write: bool, code: int
) -> None:
    with FaultyEngine(backend, at(320 * KIB, Fault(error=code))) as made:
        file = made.engine.open(path, writable=True)
        requests = [Request(file, i * 256 * KIB, 256 * KIB, arena.address + i * 256 * KIB, write) for i in range(4)]
        futures = made.engine.submit(requests)
        with pytest.raises(IOEngineError) as caught:
            futures[1].result()
        assert (caught.value.path, caught.value.offset, caught.value.nbytes) == (path, 256 * KIB, 256 * KIB)
        assert caught.value.errno == code
        assert str(path) in str(caught.value)
        assert os.strerror(code) in str(caught.value)
        assert [futures[i].result() for i in (0, 2, 3)] == [256 * KIB] * 3
        assert made.engine.stats().in_flight == 0


def test_a_short_read_inside_the_file_is_an_error(backend: BackendName, path: Path, arena: Arena) -> None:
    with FaultyEngine(backend, at(64 * KIB, Fault(short_nbytes=8 * KIB))) as made:
        (future,) = made.engine.submit([Request(made.engine.open(path), 0, 256 * KIB, arena.address)])
        with pytest.raises(IOEngineError, match=f"short read: it stopped at offset {72 * KIB}") as caught:
            future.result()
        assert caught.value.errno == errno.EIO


def test_a_short_write_is_an_error(backend: BackendName, path: Path, arena: Arena) -> None:
    with FaultyEngine(backend, at(64 * KIB, Fault(short_nbytes=8 * KIB))) as made:
        file = made.engine.open(path, writable=True)
        (future,) = made.engine.submit([Request(file, 0, 256 * KIB, arena.address, write=True)])
        with pytest.raises(IOEngineError, match=f"short write: it stopped at offset {72 * KIB}"):
            future.result()


def test_a_late_completion_is_still_a_completion(backend: BackendName, path: Path, arena: Arena) -> None:
    with FaultyEngine(backend, at(0, Fault(delay_s=0.05))) as made:
        file = made.engine.open(path)
        late, early = made.engine.submit(
            [Request(file, 0, 4096, arena.address), Request(file, 4096, 4096, arena.address + 4096)]
        )
        assert early.result() == 4096
        assert late.result() == 4096
        assert arena.array[:8192].tobytes() == path.read_bytes()[:8192]


@pytest.mark.parametrize("left_nbytes", [0, 5000, 512 * KIB], ids=["emptied", "tail", "half"])
def test_a_file_truncated_after_opening_is_an_error(
    backend: BackendName, path: Path, arena: Arena, left_nbytes: int
) -> None:
    with FaultyEngine(backend, lambda block: None) as made:
        file = made.engine.open(path)
        os.truncate(path, left_nbytes)
        whole, tail = made.engine.submit(
            [Request(file, 0, MIB, arena.address), Request(file, MIB - 100, 100, arena.address + MIB)]
        )
        for future in (whole, tail):
            with pytest.raises(IOEngineError, match=f"had {MIB} bytes when it was opened and has {left_nbytes} now"):
                future.result()


def test_a_file_that_we_grow_is_read_to_its_new_end(backend: BackendName, path: Path, arena: Arena) -> None:
    with FaultyEngine(backend, lambda block: None) as made:
        file = made.engine.open(path, writable=True)
        arena.array[:] = 5
        (written,) = made.engine.submit([Request(file, MIB, 8192 + 7, arena.address, write=True)])
        assert written.result() == 8192 + 7
        (read,) = made.engine.submit([Request(file, MIB, 12_288, arena.address + MIB)])
        assert read.result() == 8192 + 7
    assert path.stat().st_size == MIB + 8192 + 7


def test_a_descriptor_that_fails_really_is_reported(backend: BackendName, tmp_path: Path, arena: Arena) -> None:
    with FaultyEngine(backend, lambda block: None) as made:
        folder = made.engine.open(tmp_path)
        (future,) = made.engine.submit([Request(folder, 0, 4096, arena.address)])
        with pytest.raises(IOEngineError) as caught:
            future.result()
        assert caught.value.errno in (errno.EISDIR, errno.EINVAL)


def test_memory_that_is_not_there_is_reported(backend: BackendName, path: Path) -> None:
    with FaultyEngine(backend, lambda block: None) as made:
        (future,) = made.engine.submit([Request(made.engine.open(path), 0, 4096, 4096)])
        with pytest.raises(IOEngineError) as caught:
            future.result()
        assert caught.value.errno == errno.EFAULT


# ---- a disk that does not answer ----


@pytest.mark.usefixtures("no_leaks")
def test_a_stuck_block_becomes_a_timeout_and_its_memory_stays_until_the_disk_answers(
    backend: BackendName, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arena = Arena(MIB, name="stuck")
    address = arena.address
    with FaultyEngine(backend, at(64 * KIB, Fault(stuck=True)), timeout_s=0.2) as made, caplog.at_level(logging.ERROR):
        file = made.engine.open(path)
        stuck, healthy = made.engine.submit(
            [Request(file, 0, 128 * KIB, address), Request(file, 128 * KIB, 4096, address + 128 * KIB)]
        )
        assert healthy.result() == 4096
        with pytest.raises(IOEngineError, match="the disk does not answer") as caught:
            stuck.result()
        assert caught.value.errno == errno.ETIMEDOUT
        assert made.engine.abandoned() == [(path, address + 64 * KIB, 64 * KIB)]
        assert made.engine.stats().in_flight == 0
        arena.close()
        assert is_mapped(address)

        made.faulty.release_stuck()
        deadline_s = time.monotonic() + 10
        while made.engine.abandoned() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert made.engine.abandoned() == []
        assert not is_mapped(address)
        with Arena(4096, name="after") as after:
            assert made.engine.submit([Request(file, 0, 4096, after.address)])[0].result() == 4096


def is_mapped(address: int) -> bool:
    with open("/proc/self/maps", encoding="ascii") as maps:
        spans = [[int(part, 16) for part in line.split()[0].split("-")] for line in maps]
    return any(start <= address < end for start, end in spans)


def test_a_late_answer_does_not_disturb_a_request_that_already_failed(
    backend: BackendName, path: Path, arena: Arena
) -> None:
    with FaultyEngine(backend, lambda block: Fault(stuck=True), timeout_s=0.1) as made:
        futures = made.engine.submit([Request(made.engine.open(path), 0, 512 * KIB, arena.address)])
        errors = [future.exception() for future in futures]
        made.faulty.release_stuck()
        assert [type(error) for error in errors] == [IOEngineError]
        assert futures[0].exception() is errors[0]


@pytest.mark.usefixtures("no_leaks")
def test_close_with_a_stuck_disk_comes_back(backend: BackendName, path: Path, arena: Arena) -> None:
    made = FaultyEngine(backend, lambda block: Fault(stuck=True), timeout_s=0.1)
    file = made.engine.open(path)
    futures = made.engine.submit([Request(file, i * 4096, 4096, arena.address) for i in range(100)])
    made.engine.close()
    assert all(future.done() for future in futures)
    assert all(future.cancelled() or isinstance(future.exception(), IOEngineError) for future in futures)


class SilentBackend:
    """Starts blocks and finishes none by itself, like a controller that died."""

    name = "silent"
    direct = False
    num_lanes = 2

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self._started: list[tuple[Block, float]] = []
        self._finished: list[Completion] = []
        self.waiting: list[Block] = []

    def finish(self, block_id: int, error: int) -> None:
        self._started = [entry for entry in self._started if entry[0].block_id != block_id]
        self._finished.append(Completion(block_id, error, 0, 0, 0, 1))
        self.wake()

    def push(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if len(self._started) < self.num_lanes:
                self._started.append((block, time.monotonic()))
            else:
                self.waiting.append(block)

    def withdraw(self, priority: int, first_id: int, last_id: int, *, unless_started: bool) -> list[int]:
        ids = [block.block_id for block in self.waiting if first_id <= block.block_id <= last_id]
        if unless_started and len(ids) != last_id - first_id + 1:
            return []
        self.waiting = [block for block in self.waiting if block.block_id not in ids]
        return ids

    def collect(self, timeout_s: float) -> list[Completion]:
        self._inner.collect(timeout_s)
        finished, self._finished = self._finished, []
        return finished

    def wake(self) -> None:
        self._inner.wake()

    def in_flight(self) -> list[tuple[int, float]]:
        return [(block.block_id, time.monotonic() - start_s) for block, start_s in self._started]

    def cpu_s(self) -> float:
        return 0.0

    def close(self, timeout_s: float) -> bool:
        self._inner.close(timeout_s)
        return False


def test_an_error_withdraws_the_waiting_blocks_and_waits_for_the_started_ones(path: Path, arena: Arena) -> None:
    made: list[SilentBackend] = []

    def wrap(inner: Backend) -> Backend:
        made.append(SilentBackend(inner))
        return made[0]

    with Engine(backend="buffered", block_nbytes=4096, wrap_backend=wrap) as engine:
        failing, other = engine.submit(
            [Request(engine.open(path), 0, 40_960, arena.address), Request(engine.open(path), 0, 4096, arena.address)]
        )
        assert len(made[0].waiting) == 9
        made[0].finish(0, errno.EIO)
        deadline_s = time.monotonic() + 30
        while len(made[0].waiting) > 1 and time.monotonic() < deadline_s:
            time.sleep(0.001)
        assert [block.block_id for block in made[0].waiting] == [10]  # the other request's
        assert not failing.done()  # the kernel may still write into its memory: block 1 has started
        made[0].finish(1, 0)
        error = failing.exception(timeout=30)
        assert isinstance(error, IOEngineError)
        assert error.errno == errno.EIO
        assert not other.done()
        assert other.cancel()


@pytest.mark.usefixtures("no_leaks")
def test_when_every_lane_is_stuck_waiting_requests_fail_too(path: Path) -> None:
    with Arena(MIB, name="silent") as arena:
        engine = Engine(backend="buffered", timeout_s=0.1, wrap_backend=SilentBackend)
        file = engine.open(path)
        futures = engine.submit([Request(file, i * 4096, 4096, arena.address + i * 4096) for i in range(10)])
        for future in futures:
            error = future.exception(timeout=30)
            assert isinstance(error, IOEngineError)
            assert error.errno == errno.ETIMEDOUT
        assert len(engine.abandoned()) == 2
        engine.close()


@pytest.mark.usefixtures("no_leaks")
def test_a_broken_backend_is_an_error_and_not_a_hang(path: Path, arena: Arena) -> None:
    class BrokenBackend(FaultyBackend):
        def collect(self, timeout_s: float) -> list[Completion]:
            if self.broken:
                raise RuntimeError("a bug of ours")
            return super().collect(timeout_s)

        broken = False

    made: list[BrokenBackend] = []

    def wrap(inner: Backend) -> Backend:
        made.append(BrokenBackend(inner, lambda block: Fault(stuck=True)))
        return made[0]

    engine = Engine(backend="buffered", wrap_backend=wrap)
    futures = engine.submit([Request(engine.open(path), 0, 4096, arena.address)])
    made[0].broken = True
    with pytest.raises(IOEngineError, match="a bug of ours"):
        futures[0].result(timeout=30)
    engine.close()


# ---- the native and the Python lanes, really stuck: a read of an empty pipe ----


class Pipe:
    """A descriptor whose read waits until `fill`, and a page to read into."""

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe()
        self.arena = Arena(4096, name="pipe")

    def block(self, block_id: int, priority: int = 0, request_id: int | None = None) -> Block:
        request_id = block_id if request_id is None else request_id
        return Block(block_id, request_id, priority, self.read_fd, 0, 4096, self.arena.address, False, False)

    def fill(self) -> None:
        os.write(self.write_fd, bytes(4096))

    def close(self) -> None:
        os.close(self.read_fd)
        os.close(self.write_fd)
        self.arena.close()


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipe]:
    pipe = Pipe()
    real_preadv = os.preadv

    def preadv(fd: int, buffers: Sequence[Any], offset: int) -> int:  # the system call refuses pipes; io_uring does not
        return os.readv(fd, buffers) if fd == pipe.read_fd else real_preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    yield pipe
    pipe.close()


@pytest.fixture(params=["io_uring", "threads"])
def lane(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """A backend with a single lane."""
    try:
        backend: Backend = UringBackend(1, 0, 0) if request.param == "io_uring" else ThreadsBackend(1, 0, 0)
    except (ImportError, OSError) as error:
        pytest.skip(f"no io_uring: {error}")
    yield backend
    backend.close(5.0)


def collect(backend: Backend, num: int) -> list[Completion]:
    found: list[Completion] = []
    deadline_s = time.monotonic() + 30
    while len(found) < num and time.monotonic() < deadline_s:
        found.extend(backend.collect(0.1))
    return found


def wait_started(backend: Backend, block_id: int) -> None:
    deadline_s = time.monotonic() + 30
    while [started for started, _ in backend.in_flight()] != [block_id] and time.monotonic() < deadline_s:
        time.sleep(0.001)


def test_blocks_behind_a_busy_lane_start_in_order_and_can_be_withdrawn(lane: Backend, pipe: Pipe) -> None:
    lane.push([pipe.block(0)])
    wait_started(lane, 0)
    lane.push([pipe.block(1, priority=5), pipe.block(2, priority=5), pipe.block(3), pipe.block(4, priority=-1)])
    lane.push([pipe.block(5, priority=-1), pipe.block(6, priority=7), pipe.block(7, priority=7)])
    assert lane.withdraw(0, 0, 0, unless_started=True) == []  # it has started
    assert lane.withdraw(0, 0, 3, unless_started=True) == []  # one of them has, so none is withdrawn
    assert lane.withdraw(7, 6, 7, unless_started=True) == [6, 7]
    assert lane.withdraw(5, 1, 1, unless_started=False) == [1]
    assert lane.withdraw(5, 1, 1, unless_started=False) == []
    assert [block_id for block_id, _ in lane.in_flight()] == [0]
    for _ in range(5):
        pipe.fill()
    completions = collect(lane, 5)
    assert [completion.block_id for completion in completions] == [0, 4, 5, 3, 2]
    assert {completion.device_nbytes for completion in completions} == {4096}


@pytest.mark.timeout(60)
def test_only_the_last_block_of_a_request_wakes_the_collector(lane: Backend, pipe: Pipe) -> None:
    lane.push([pipe.block(i, request_id=0) for i in range(4)])
    for started in (0, 1, 2):
        wait_started(lane, started)
        if started < 2:
            pipe.fill()
    assert lane.withdraw(0, 0, 3, unless_started=False) == [3]
    pipe.fill()
    assert [completion.block_id for completion in lane.collect(_FOREVER_S)] == [0, 1, 2]


@pytest.mark.timeout(60)
def test_withdrawing_the_rest_wakes_the_collector_for_what_had_finished(lane: Backend, pipe: Pipe) -> None:
    lane.push([pipe.block(0, request_id=0), pipe.block(1, request_id=0)])
    wait_started(lane, 0)
    lane.push([pipe.block(2, priority=-1)])
    pipe.fill()
    wait_started(lane, 2)
    assert lane.withdraw(0, 0, 1, unless_started=False) == [1]
    assert [completion.block_id for completion in lane.collect(_FOREVER_S)] == [0]
    pipe.fill()
    assert [completion.block_id for completion in lane.collect(_FOREVER_S)] == [2]


@pytest.mark.timeout(60)
def test_a_failed_block_wakes_the_collector_at_once(lane: Backend, pipe: Pipe) -> None:
    bad = pipe.block(0, request_id=0)._replace(fd=-1)
    lane.push([bad, pipe.block(1, request_id=0)])
    assert [(completion.block_id, completion.error) for completion in lane.collect(_FOREVER_S)] == [(0, errno.EBADF)]
    pipe.fill()
    assert [completion.block_id for completion in lane.collect(_FOREVER_S)] == [1]


def test_a_partial_transfer_is_continued(lane: Backend, pipe: Pipe) -> None:
    lane.push([pipe.block(0)])
    wait_started(lane, 0)
    for part in (b"a" * 1000, b"b" * 3000, b"c" * 96):
        os.write(pipe.write_fd, part)
        time.sleep(0.01)
    (completion,) = collect(lane, 1)
    assert (completion.error, completion.useful_nbytes) == (0, 4096)
    assert pipe.arena.array.tobytes() == b"a" * 1000 + b"b" * 3000 + b"c" * 96


def test_progress_is_seen_by_the_watchdog(lane: Backend, pipe: Pipe) -> None:
    lane.push([pipe.block(0)])
    wait_started(lane, 0)
    time.sleep(0.3)
    os.write(pipe.write_fd, b"x")
    deadline_s = time.monotonic() + 30
    while (age_s := lane.in_flight()[0][1]) > 0.25 and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert age_s <= 0.25
    os.write(pipe.write_fd, bytes(4095))
    assert len(collect(lane, 1)) == 1


def test_wake_ends_a_collect_without_completions(lane: Backend) -> None:
    found: list[list[Completion]] = []
    waiting = threading.Thread(target=lambda: found.append(lane.collect(600.0)))
    waiting.start()
    lane.wake()
    waiting.join(30)
    assert found == [[]]


@pytest.mark.usefixtures("no_leaks")
def test_a_stuck_lane_is_left_behind_and_starts_nothing_more(lane: Backend, pipe: Pipe) -> None:
    lane.push([pipe.block(0)])
    wait_started(lane, 0)
    assert lane.close(0.1) is False
    assert lane.close(0.1) is True  # idempotent: nothing is left to do here
    os.write(pipe.write_fd, b"x" * 100)  # the disk answers in part; the thread must not ask for the rest, but end
    deadline_s = time.monotonic() + 30
    while _lane_threads() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert _lane_threads() == []
    assert pipe.arena.array[:100].tobytes() == b"x" * 100


def _lane_threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate() if thread.name == "hetero-io-0"]
    for task in os.listdir("/proc/self/task"):
        try:
            name = Path(f"/proc/self/task/{task}/comm").read_text().strip()
        except OSError:
            continue
        if name == "hetero-io-ring":
            names.append(name)
    return names


def test_futures_of_one_engine_work_with_wait(backend: BackendName, path: Path, arena: Arena) -> None:
    with FaultyEngine(backend, at(0, Fault(error=errno.EIO))) as made:
        file = made.engine.open(path)
        futures: list[Future[int]] = made.engine.submit(
            [Request(file, 0, 4096, arena.address), Request(file, 4096, 4096, arena.address + 4096)]
        )
        done, pending = wait(futures, timeout=30)
        assert (len(done), len(pending)) == (2, 0)
