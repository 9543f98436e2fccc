"""One behaviour on three backends: exact bytes, order, cancellation, statistics, and nothing left behind."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.io.arena import Arena
from hetero.io.backends import probe
from hetero.io.backends.base import Backend, Block, Completion
from hetero.io.backends.faulty import FaultyBackend
from hetero.io.backends.probe import BackendName
from hetero.io.engine import Engine, File, Request
from hetero.io.errors import ConfigError, HeteroError, IOEngineError, UnsupportedError
from hetero.io.request import split_request

KIB, MIB = 1 << 10, 1 << 20
FILE_NBYTES = MIB + 1234
BACKENDS: tuple[BackendName, ...] = ("io_uring", "threads", "buffered")


def start(backend: BackendName, **options: object) -> Engine:
    """A small engine, so that small requests have many blocks; skips where the kernel forbids io_uring."""
    settings: dict[str, object] = {"block_nbytes": 64 * KIB, "bounce_nbytes": 64 * KIB, **options}
    try:
        return Engine(backend=backend, **settings)  # type: ignore[arg-type]
    except UnsupportedError as error:
        if os.environ.get("HETERO_REQUIRE_NATIVE") == "1" and "not built" in str(error):
            raise
        pytest.skip(str(error))


@pytest.fixture(params=BACKENDS, scope="module")
def backend(request: pytest.FixtureRequest) -> BackendName:
    name: BackendName = request.param
    return name


@pytest.fixture(scope="module")
def engine(backend: BackendName) -> Iterator[Engine]:
    with start(backend) as engine:
        yield engine


@pytest.fixture(scope="module")
def content() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, FILE_NBYTES, dtype=np.uint8)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, content: np.ndarray) -> Path:
    path = tmp_path_factory.mktemp("engine") / "content.bin"
    content.tofile(path)
    return path


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    with Arena(2 * MIB, name="test") as arena:
        yield arena


def num_tasks() -> int:
    """Threads of this process, native ones included; not the kernel's own for io_uring, which come and go."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            names.append((task / "comm").read_text())
    return sum(not name.startswith("iou-") for name in names)


# ---- bytes ----


@settings(deadline=None)  # a disk may be busy
@given(st.integers(0, FILE_NBYTES - 1), st.integers(0, 300 * KIB), st.integers(0, 8192), st.booleans())
def test_any_read_equals_the_file(
    engine: Engine, path: Path, content: np.ndarray, arena: Arena, offset: int, nbytes: int, shift: int, agree: bool
) -> None:
    nbytes = min(nbytes, FILE_NBYTES - offset)
    at = 4096 + (shift // 4096 * 4096 + offset % 4096 if agree else shift)
    arena.array[:] = 0xAA
    file = engine.open(path)
    (future,) = engine.submit([Request(file, offset, nbytes, arena.address + at)])
    assert future.result() == nbytes
    assert np.array_equal(arena.array[at : at + nbytes], content[offset : offset + nbytes])
    assert (arena.array[:at] == 0xAA).all()
    assert (arena.array[at + nbytes :] == 0xAA).all()
    file.close()


@settings(deadline=None)
@given(st.integers(0, 300 * KIB), st.integers(0, 200 * KIB), st.integers(0, 8192), st.booleans())
def test_any_write_changes_its_bytes_only(
    engine: Engine, path: Path, content: np.ndarray, arena: Arena, offset: int, nbytes: int, shift: int, agree: bool
) -> None:
    target = path.with_suffix(".written")
    target.write_bytes(content[: 400 * KIB + 5].tobytes())
    at = 4096 + (shift // 4096 * 4096 + offset % 4096 if agree else shift)
    arena.array[at : at + nbytes] = 255 - content[offset : offset + nbytes]
    file = engine.open(target, writable=True)
    (future,) = engine.submit([Request(file, offset, nbytes, arena.address + at, write=True)])
    assert future.result() == nbytes
    file.close()
    expected = content[: max(400 * KIB + 5, offset + nbytes)].copy()
    expected[400 * KIB + 5 :] = 0
    expected[offset : offset + nbytes] = 255 - content[offset : offset + nbytes]
    assert np.array_equal(np.fromfile(target, dtype=np.uint8), expected)


@pytest.mark.parametrize("beyond_nbytes", [0, 1, 4095 - 1234 % 4096 + 1])
def test_a_read_past_the_end_by_less_than_a_page_stops_at_the_end(
    engine: Engine, path: Path, content: np.ndarray, arena: Arena, beyond_nbytes: int
) -> None:
    offset = FILE_NBYTES // 4096 * 4096 - 128 * KIB
    nbytes = FILE_NBYTES - offset + beyond_nbytes
    arena.array[:] = 0
    file = engine.open(path)
    (future,) = engine.submit([Request(file, offset, nbytes, arena.address)])
    assert future.result() == FILE_NBYTES - offset
    assert np.array_equal(arena.array[: FILE_NBYTES - offset], content[offset:])
    file.close()


@pytest.mark.parametrize("offset", [0, MIB, 2 * MIB], ids=["across", "from inside the last page", "wholly beyond"])
def test_a_read_a_page_past_the_end_is_an_error(engine: Engine, path: Path, arena: Arena, offset: int) -> None:
    nbytes = max(FILE_NBYTES - offset, 0) // 4096 * 4096 + 8192
    file = engine.open(path)
    (future,) = engine.submit([Request(file, offset, nbytes, arena.address)])
    with pytest.raises(IOEngineError, match="past the end") as caught:
        future.result()
    assert (caught.value.path, caught.value.offset, caught.value.nbytes) == (path, offset, nbytes)
    file.close()


def test_empty_requests_are_done_at_once(engine: Engine, path: Path) -> None:
    file = engine.open(path)
    assert engine.submit([]) == []
    assert [future.result(timeout=0) for future in engine.submit([Request(file, 0, 0, 0)])] == [0]
    file.close()


def test_two_threads_submit_at_once(engine: Engine, path: Path, content: np.ndarray, arena: Arena) -> None:
    file = engine.open(path)
    arena.array[:] = 0
    results: list[int] = []

    def read(first: int) -> None:
        for page in range(first, 256, 2):
            future = engine.submit([Request(file, page * 4096, 4096, arena.address + page * 4096)])[0]
            results.append(future.result())

    threads = [threading.Thread(target=read, args=(first,)) for first in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [4096] * 256
    assert np.array_equal(arena.array[:MIB], content[:MIB])
    file.close()


def test_ten_thousand_small_requests_with_constant_descriptors(
    engine: Engine, path: Path, content: np.ndarray, arena: Arena
) -> None:
    file = engine.open(path)
    before, tasks = len(os.listdir("/proc/self/fd")), num_tasks()
    for _ in range(10):
        requests = [Request(file, i * 512, 512, arena.address + i * 512) for i in range(1000)]
        assert sum(future.result() for future in engine.submit(requests)) == 512_000
        assert len(os.listdir("/proc/self/fd")) == before
    assert num_tasks() <= tasks  # fewer when threads of the test before were still ending
    assert np.array_equal(arena.array[:512_000], content[:512_000])
    assert engine.stats().in_flight == 0
    file.close()


# ---- how a request is split (integers only) ----


class FakeFile:
    def __init__(self, direct: bool) -> None:
        self.direct, self.direct_fd, self.plain_fd = direct, 10 if direct else -1, 11


@given(
    st.integers(0, 50_000),
    st.integers(1, 60_000),
    st.integers(4096, 12_288),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_blocks_cover_the_request_once_and_obey_o_direct(
    offset: int, nbytes: int, address: int, agree: bool, write: bool, direct: bool
) -> None:
    if agree:
        address = address // 4096 * 4096 + offset % 4096
    file: File = FakeFile(direct)  # type: ignore[assignment]
    blocks = split_request(Request(file, offset, nbytes, address, write, priority=3), 100, 16 * KIB, 8 * KIB)
    assert [block.block_id for block in blocks] == list(range(100, 100 + len(blocks)))
    covered = offset
    for block in blocks:
        assert (block.priority, block.request_id) == (3, 100)
        assert block.write == write
        assert block.useful_offset == covered
        covered += block.useful_nbytes
        if block.aligned:
            assert (block.fd, block.offset % 4096, block.nbytes % 4096) == (10, 0, 0)
        else:
            assert block.fd == 11
        if block.copy_nbytes:
            assert block.aligned
            assert block.nbytes <= 8 * KIB
            assert block.copy_skip + block.copy_nbytes <= block.nbytes
            if write:  # never a page of which only a part is ours
                assert (block.copy_skip, block.copy_nbytes) == (0, block.nbytes)
        else:
            assert block.nbytes <= 16 * KIB
            assert block.address - address == block.offset - offset
            assert not block.aligned or block.address % 4096 == 0
    assert covered == offset + nbytes


def test_an_aligned_request_never_bounces() -> None:
    file: File = FakeFile(direct=True)  # type: ignore[assignment]
    blocks = split_request(Request(file, 8192, 40 * KIB, 1 << 20), 0, 16 * KIB, 8 * KIB)
    assert blocks == [
        Block(0, 0, 0, 10, 8192, 16 * KIB, 1 << 20, False, True),
        Block(1, 0, 0, 10, 8192 + 16 * KIB, 16 * KIB, (1 << 20) + 16 * KIB, False, True),
        Block(2, 0, 0, 10, 8192 + 32 * KIB, 8 * KIB, (1 << 20) + 32 * KIB, False, True),
    ]


# ---- order, cancellation, callbacks ----


class RecordingBackend(FaultyBackend):
    """Remembers the order in which blocks ended."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner, lambda block: None)
        self.order: list[int] = []

    def collect(self, timeout_s: float) -> list[Completion]:
        completions = super().collect(timeout_s)
        self.order.extend(completion.block_id for completion in completions)
        return completions


def test_lowest_priority_number_first_then_order_of_submission(backend: BackendName, path: Path, arena: Arena) -> None:
    made: list[RecordingBackend] = []

    def wrap(inner: Backend) -> Backend:
        made.append(RecordingBackend(inner))
        return made[0]

    with start(backend, queue_depth=1, wrap_backend=wrap) as engine:
        file = engine.open(path)
        priorities = [(i * 7) % 10 for i in range(40)]
        wait(
            engine.submit([Request(file, i * 4096, 4096, arena.address, priority=p) for i, p in enumerate(priorities)])
        )
    assert made[0].order == sorted(range(40), key=lambda i: (priorities[i], i))


def test_cancelled_requests_touch_nothing_and_the_others_are_whole(
    backend: BackendName, path: Path, content: np.ndarray
) -> None:
    num, nbytes = 200, 256 * KIB
    with Arena(num * nbytes, name="cancel") as arena, start(backend, queue_depth=1) as engine:
        arena.array[:] = 0xAA
        file = engine.open(path)
        futures = engine.submit([Request(file, 0, nbytes, arena.address + i * nbytes) for i in range(num)])
        cancelled = [future.cancel() for future in reversed(futures)][::-1]
        _, pending = wait(futures, timeout=60)
        assert not pending
        assert [future.cancelled() for future in futures] == cancelled
        assert any(cancelled)
        for i, future in enumerate(futures):
            memory = arena.array[i * nbytes : (i + 1) * nbytes]
            if cancelled[i]:
                assert (memory == 0xAA).all()
            else:
                assert future.result() == nbytes
                assert not future.cancel()
                assert np.array_equal(memory, content[:nbytes])
        assert engine.stats().in_flight == 0


def test_close_cancels_what_waits_and_finishes_what_has_started(
    backend: BackendName, path: Path, content: np.ndarray
) -> None:
    num, nbytes = 200, 256 * KIB
    with Arena(num * nbytes, name="close") as arena:
        engine = start(backend)
        file = engine.open(path)
        futures = engine.submit([Request(file, 0, nbytes, arena.address + i * nbytes) for i in range(num)])
        engine.close()
        engine.close()
        assert all(future.done() for future in futures)
        assert any(future.cancelled() for future in futures)
        for i, future in enumerate(futures):
            if not future.cancelled():
                assert future.result() == nbytes
                assert np.array_equal(arena.array[i * nbytes : (i + 1) * nbytes], content[:nbytes])


def test_close_from_a_callback_is_refused(backend: BackendName, path: Path, arena: Arena) -> None:
    caught: list[HeteroError] = []
    added = threading.Event()
    with start(backend, wrap_backend=lambda inner: GatedBackend(inner, added)) as engine:

        def close(_: Future[int]) -> None:
            try:
                engine.close()
            except HeteroError as error:
                caught.append(error)

        future = engine.submit([Request(engine.open(path), 0, 4096, arena.address)])[0]
        future.add_done_callback(close)
        added.set()
        assert future.result() == 4096
    assert ["callback" in str(error) for error in caught] == [True]


class GatedBackend(FaultyBackend):
    """Tells nothing before `gate` is set, so that a callback is there in time to run on the collector thread."""

    def __init__(self, inner: Backend, gate: threading.Event) -> None:
        super().__init__(inner, lambda block: None)
        self._gate = gate

    def collect(self, timeout_s: float) -> list[Completion]:
        completions = super().collect(timeout_s)
        if completions:
            self._gate.wait()
        return completions


# ---- files ----


def test_a_path_is_opened_once_until_the_file_behind_it_is_replaced(
    engine: Engine, tmp_path: Path, content: np.ndarray, arena: Arena
) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"old" * 4096)
    old = engine.open(path)
    assert engine.open(path) is old
    assert engine.open(path, writable=True) is not old
    (tmp_path / "new").write_bytes(b"new" * 4096)
    os.replace(tmp_path / "new", path)
    new = engine.open(path)
    assert new is not old
    assert new.identity != old.identity
    for file, text in ((old, b"old"), (new, b"new")):
        engine.submit([Request(file, 0, 12_288, arena.address)])[0].result()
        assert arena.array[:3].tobytes() == text


def test_a_file_stays_open_for_requests_already_submitted(
    backend: BackendName, path: Path, content: np.ndarray, arena: Arena
) -> None:
    with start(backend, queue_depth=1) as engine:
        file = engine.open(path)
        futures = engine.submit([Request(file, 0, MIB, arena.address) for _ in range(20)])
        file.close()
        assert [future.result() for future in futures] == [MIB] * 20
        with pytest.raises(ConfigError, match="is closed"):
            engine.submit([Request(file, 0, 4096, arena.address)])
        assert not [name for name in map(_target, os.listdir("/proc/self/fd")) if name == str(path)]


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:  # the one that listed the folder
        return ""


@pytest.mark.parametrize("writable", [True, False])
def test_a_missing_file_is_named(engine: Engine, tmp_path: Path, writable: bool) -> None:
    with pytest.raises(IOEngineError) as caught:
        engine.open(tmp_path / "missing.bin", writable=writable)
    assert caught.value.errno == errno.ENOENT
    assert "missing.bin" in str(caught.value)


def test_a_file_system_without_o_direct_is_buffered_with_one_line(
    path: Path, content: np.ndarray, arena: Arena, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real_open = os.open

    def refuse_direct(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "refused")
        return real_open(path, flags, mode)

    with start("threads") as engine, caplog.at_level(logging.INFO, logger="hetero.io"):
        monkeypatch.setattr(os, "open", refuse_direct)
        file = engine.open(path)
        engine.open(path)
        monkeypatch.undo()
        assert not file.direct
        (future,) = engine.submit([Request(file, 5, 10_000, arena.address + 1)])
        assert future.result() == 10_000
        assert np.array_equal(arena.array[1:10_001], content[5:10_005])
    assert [record.levelname for record in caplog.records if str(path) in record.getMessage()] == ["INFO"]


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs here")
def test_a_file_on_tmpfs_is_read(backend: BackendName, content: np.ndarray, arena: Arena) -> None:
    path = Path(f"/dev/shm/hetero-test-{os.getpid()}.bin")
    try:
        path.write_bytes(content.tobytes())
        with start(backend) as engine:
            (future,) = engine.submit([Request(engine.open(path), 17, 100_000, arena.address)])
            assert future.result() == 100_000
        assert np.array_equal(arena.array[:100_000], content[17:100_017])
    finally:
        path.unlink(missing_ok=True)


# ---- statistics ----


def test_bytes_and_operations_are_counted_exactly(backend: BackendName, tmp_path: Path, arena: Arena) -> None:
    path = tmp_path / "counted.bin"
    path.write_bytes(bytes(MIB))
    with start(backend) as engine:
        file = engine.open(path, writable=True)
        direct = backend != "buffered"
        requests = [
            Request(file, 0, 256 * KIB, arena.address),  # 4 blocks
            Request(file, 256 * KIB, 128 * KIB, arena.address + MIB, write=True),  # 2 blocks
            Request(file, 512 * KIB + 10, 20, arena.address + 3),  # part of a page
        ]
        wait(engine.submit(requests))
        (stats,) = engine.stats().files
        assert stats.path == path
        assert (stats.num_reads, stats.num_writes) == (5, 2)
        assert stats.useful_read_nbytes == 256 * KIB + 20
        assert stats.read_nbytes == 256 * KIB + (4096 if direct else 20)
        assert stats.written_nbytes == 128 * KIB
        assert stats.busy_s > 0
        assert engine.stats().read_nbytes == stats.read_nbytes
        assert engine.stats().written_nbytes == stats.written_nbytes
        assert engine.stats().cpu_s > 0
        assert engine.stats().backend == engine.backend_name == backend


# ---- threads, descriptors, processes ----


@pytest.mark.usefixtures("no_leaks")
def test_close_leaves_no_thread_and_no_descriptor(backend: BackendName, path: Path, arena: Arena) -> None:
    tasks = num_tasks()
    for _ in range(20):
        with start(backend) as engine:
            wait(engine.submit([Request(engine.open(path), 3, 100_000, arena.address)]))
    deadline_s = time.monotonic() + 10
    while num_tasks() > tasks and time.monotonic() < deadline_s:  # a joined Python thread leaves the kernel a bit later
        time.sleep(0.01)
    assert num_tasks() <= tasks
    with pytest.raises(ConfigError, match="closed"):
        engine.open(path)


def run_python(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **environment})


def test_an_interpreter_may_end_without_close(backend: BackendName, path: Path) -> None:
    script = """
        import atexit, sys, threading
        atexit.register(lambda: print("threads", threading.active_count()))  # registered first, so run last
        from hetero.io.arena import Arena
        from hetero.io.engine import Engine, Request
        arena = Arena(1 << 20, name="left open")
        engine = Engine(backend=sys.argv[1])
        file = engine.open(sys.argv[2])
        # bounced: a copy into memory that is already gone would crash the process
        engine.submit([Request(file, 3, (1 << 20) - 3, arena.address) for _ in range(500)])
    """
    start(backend).close()
    done = run_python(script, backend, str(path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "threads 1\n", "")


def test_ctrl_c_while_waiting_for_a_result_ends_the_program(backend: BackendName, path: Path) -> None:
    script = """
        import os, signal, sys, threading
        from hetero.io.arena import Arena
        from hetero.io.engine import Engine, Request
        arena = Arena(1 << 20, name="interrupted")
        try:
            with Engine(backend=sys.argv[1], queue_depth=1) as engine:
                file = engine.open(sys.argv[2])
                threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
                while True:
                    futures = engine.submit([Request(file, 0, 1 << 20, arena.address) for _ in range(500)])
                    for future in futures:
                        future.result()
        except KeyboardInterrupt:
            print("interrupted", threading.active_count())
    """
    start(backend).close()
    done = run_python(script, backend, str(path))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("interrupted")


def test_a_forked_child_is_told_to_make_its_own_engine(backend: BackendName, path: Path) -> None:
    script = """
        import os, sys, warnings
        from hetero.io.arena import Arena
        from hetero.io.engine import Engine, Request
        from hetero.io.errors import HeteroError
        warnings.simplefilter("ignore")  # forking with threads is what is tested
        arena = Arena(1 << 20, name="forked")
        engine = Engine(backend=sys.argv[1])
        file = engine.open(sys.argv[2])
        future = engine.submit([Request(file, 0, 4096, arena.address)])[0]
        child = os.fork()
        if child == 0:
            told = 0
            for call in (lambda: engine.submit([]), lambda: engine.open(sys.argv[2]), future.cancel):
                try:
                    call()
                except HeteroError as error:
                    told += "forked child" in str(error)
            engine.close()
            with Engine(backend=sys.argv[1]) as own:
                mine = Arena(1 << 20, name="the child's")
                told += own.submit([Request(own.open(sys.argv[2]), 0, 4096, mine.address)])[0].result() == 4096
            sys.exit(told)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
        assert future.result() == 4096
        assert engine.submit([Request(file, 0, 4096, arena.address)])[0].result() == 4096
    """
    start(backend).close()
    done = run_python(script, backend, str(path))
    assert (done.returncode, done.stderr) == (0, "")


# ---- options and the choice of a backend ----


@pytest.mark.parametrize(
    "options",
    [
        {"block_nbytes": 0},
        {"block_nbytes": 4097},
        {"block_nbytes": 2 << 30},
        {"queue_depth": 0},
        {"queue_depth": 1000},
        {"bounce_nbytes": 4096},
        {"timeout_s": 0.0},
        {"timeout_s": float("nan")},
        {"backend": "aio"},
    ],
    ids=str,
)
def test_an_option_that_cannot_work_is_named_with_its_value(options: dict[str, object]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(ConfigError) as caught:
        Engine(**options)  # type: ignore[arg-type]
    assert name in str(caught.value)
    assert str(value) in str(caught.value)


@pytest.mark.parametrize("fields", [(-1, 4096, 4096), (0, -1, 4096), (0, 4096, 0), (0, 4096, -4096)])
def test_a_request_that_cannot_be_meant_is_refused_before_anything_is_queued(
    engine: Engine, path: Path, arena: Arena, fields: tuple[int, int, int]
) -> None:
    file = engine.open(path)
    reads = engine.stats().files[0].num_reads if engine.stats().files else 0
    with pytest.raises(ConfigError, match="must be 0 or more"):
        engine.submit([Request(file, 0, 4096, arena.address), Request(file, *fields)])
    assert engine.stats().in_flight == 0
    assert (engine.stats().files[0].num_reads if engine.stats().files else 0) == reads
    file.close()


def test_a_file_opened_for_reading_is_not_written(engine: Engine, path: Path, arena: Arena) -> None:
    file = engine.open(path)
    with pytest.raises(ConfigError, match="writable=True"):
        engine.submit([Request(file, 0, 4096, arena.address, write=True)])
    file.close()


@pytest.mark.parametrize("name", get_args(BackendName))
def test_the_environment_chooses_for_auto(name: BackendName, monkeypatch: pytest.MonkeyPatch) -> None:
    start(name).close()
    monkeypatch.setenv("HETERO_IO", name)
    with Engine(backend="auto") as engine:
        assert engine.backend_name == name or name == "auto"
    with Engine(backend="buffered") as engine:
        assert engine.backend_name == "buffered"


def test_an_unknown_word_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERO_IO", "uring")
    with pytest.raises(ConfigError, match=r"HETERO_IO='uring'.*io_uring, threads, buffered"):
        Engine()


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, errno.EINVAL, errno.ENOMEM, None], ids=str)
def test_without_io_uring_auto_means_threads_and_one_line_says_so(
    code: int | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise ImportError("hetero.io._uring") if code is None else OSError(code, os.strerror(code))

    monkeypatch.delenv("HETERO_IO", raising=False)
    monkeypatch.setattr(probe, "UringBackend", refuse)
    monkeypatch.setattr(probe, "_fallback_announced", False)
    with caplog.at_level(logging.INFO, logger="hetero.io"):
        for _ in range(3):
            with Engine() as engine:
                assert engine.backend_name == "threads"
    (record,) = [record for record in caplog.records if record.name == "hetero.io"]
    assert record.levelname == "INFO"
    assert ("not built" if code is None else errno.errorcode[code]) in record.getMessage()
    with pytest.raises(UnsupportedError, match="HETERO_IO=threads"):
        Engine(backend="io_uring")


@pytest.mark.skipif(os.uname().machine not in ("x86_64", "aarch64"), reason="the filter knows two machines")
def test_a_real_seccomp_filter_as_containers_have_it(path: Path) -> None:
    script = """
        import ctypes, logging, struct, sys
        filters = struct.pack("HBBIHBBIHBBIHBBI", 0x20, 0, 0, 0, 0x15, 0, 1, 425, 6, 0, 0, 0x50001, 6, 0, 0, 0x7FFF0000)
        memory = ctypes.create_string_buffer(filters)  # io_uring_setup is 425 everywhere: EPERM; all else allowed
        program = struct.pack("HxxxxxxP", 4, ctypes.addressof(memory))
        libc = ctypes.CDLL(None)
        assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.c_char_p(program), 0, 0) == 0
        logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
        from hetero.io.arena import Arena
        from hetero.io.engine import Engine, Request
        with Arena(1 << 20, name="test") as arena:
            for _ in range(2):
                with Engine() as engine:
                    future = engine.submit([Request(engine.open(sys.argv[1]), 0, 1 << 20, arena.address)])[0]
                    print(engine.backend_name, future.result())
    """
    start("io_uring").close()
    done = run_python(script, str(path), HETERO_IO="auto")
    assert done.stdout == "threads 1048576\nthreads 1048576\n"
    assert done.stderr.count("hetero.io io_uring is not available") == 1
    assert "EPERM" in done.stderr
