"""The asyncio face: whole files or none, whatever fails on the way and whenever it is cancelled."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hetero.io.aio import read_bytes, write_atomic, write_atomic_sync
from hetero.io.errors import IOEngineError

Write = Callable[..., None]


def write_async(path: Path, data: bytes, **options: int) -> None:
    asyncio.run(write_atomic(path, data, **options))


both = pytest.mark.parametrize("write", [write_async, write_atomic_sync], ids=["async", "sync"])


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.mark.usefixtures("no_leaks")
@both
@pytest.mark.parametrize("data", [b"", b"new", bytes(300_000)], ids=len)
def test_what_is_written_is_read(write: Write, data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    for _ in range(2):
        write(path, data)
        assert asyncio.run(read_bytes(path)) == data
    assert names(tmp_path) == ["file"]


@both
@pytest.mark.parametrize("data", [bytearray(b"abc"), memoryview(b"xabcx")[1:4]], ids=["bytearray", "view"])
def test_any_bytes(write: Write, data: bytearray | memoryview, tmp_path: Path) -> None:
    write(tmp_path / "file", data)
    assert (tmp_path / "file").read_bytes() == b"abc"


@both
def test_the_mode_is_the_callers_less_the_umask(write: Write, tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        write(tmp_path / "private", b"", mode=0o600)
        write(tmp_path / "public", b"")
    finally:
        os.umask(old)
    assert stat.S_IMODE(os.stat(tmp_path / "private").st_mode) == 0o600
    assert stat.S_IMODE(os.stat(tmp_path / "public").st_mode) == 0o644


@both
def test_a_link_is_replaced_not_followed(write: Write, tmp_path: Path) -> None:
    (tmp_path / "target").write_text("keep")
    (tmp_path / "link").symlink_to("target")
    write(tmp_path / "link", b"new")
    assert (tmp_path / "target").read_text() == "keep"
    assert not (tmp_path / "link").is_symlink()


@both
def test_the_order_that_survives_a_power_cut(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All bytes in the file, the file synced, then the name, then the folder synced."""
    path, steps = tmp_path / "file", list[tuple[str, int, int]]()
    fsync, replace = os.fsync, os.replace

    def spy_fsync(fd: int) -> None:
        status = os.fstat(fd)
        steps.append(("sync", status.st_ino, status.st_size if stat.S_ISREG(status.st_mode) else -1))
        fsync(fd)

    def spy_replace(source: Path, target: Path) -> None:
        steps.append(("name", os.stat(source).st_ino, os.stat(source).st_size))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "replace", spy_replace)
    write(path, b"12345")
    inode = os.stat(path).st_ino
    assert steps == [("sync", inode, 5), ("name", inode, 5), ("sync", os.stat(tmp_path).st_ino, -1)]


@pytest.mark.usefixtures("no_leaks")
@both
@pytest.mark.parametrize("step", ["open", "fsync", "replace"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_failed_step_leaves_the_old_file(
    write: Write, step: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    original = getattr(os, step)

    def fail(first: object, *rest: object, **options: object) -> object:
        if step == "open" and not str(first).endswith(".tmp"):
            return original(first, *rest, **options)
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        with pytest.raises(IOEngineError, match=r"3 bytes at offset 0 of .*/file") as caught:
            write(path, b"new")
    assert (caught.value.errno, caught.value.path) == (number, path)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@both
def test_a_write_that_stops_in_the_middle_leaves_the_old_file(write: Write, tmp_path: Path) -> None:
    """A real one: the kernel takes the first 64 KiB and then refuses."""
    path = tmp_path / "file"
    path.write_text("old")
    with file_size_limit(64 << 10), pytest.raises(IOEngineError) as caught:
        write(path, bytes(200_000))
    assert caught.value.errno == errno.EFBIG
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


@both
def test_a_folder_that_cannot_be_synced_fails_unless_its_file_system_never_can(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, number = os.fsync, errno.EINVAL

    def fail_on_folders(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", fail_on_folders)
    write(tmp_path / "file", b"1")
    number = errno.EIO
    with pytest.raises(IOEngineError) as caught:
        write(tmp_path / "file", b"2")
    assert caught.value.errno == errno.EIO
    assert (tmp_path / "file").read_bytes() == b"2"


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("number", [0, errno.ENOSPC], ids=["succeeds", "fails"])
def test_a_cancelled_write_ends_first(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    fsync, started, go_on = os.fsync, threading.Event(), threading.Event()

    def slow_fsync(fd: int) -> None:
        started.set()
        assert go_on.wait(60)
        if number:
            raise OSError(number, os.strerror(number))
        fsync(fd)

    async def main() -> None:
        task = asyncio.create_task(write_atomic(path, b"new"))
        await asyncio.to_thread(started.wait, 60)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    monkeypatch.setattr(os, "fsync", slow_fsync)
    asyncio.run(main())
    assert path.read_text() == ("old" if number else "new")
    assert names(tmp_path) == ["file"]


def test_many_at_once(tmp_path: Path) -> None:
    async def main() -> list[bytes]:
        await asyncio.gather(*(write_atomic(tmp_path / str(i % 4), bytes([i % 4]) * 1000) for i in range(32)))
        return await asyncio.gather(*(read_bytes(tmp_path / str(i)) for i in range(4)))

    assert asyncio.run(main()) == [bytes([i]) * 1000 for i in range(4)]
    assert names(tmp_path) == ["0", "1", "2", "3"]


def test_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(IOEngineError, match=r"No such file or directory .*/gone") as caught:
        asyncio.run(read_bytes(tmp_path / "gone"))
    assert caught.value.errno == errno.ENOENT
    with pytest.raises(IOEngineError, match="gone/file"):
        write_atomic_sync(tmp_path / "gone" / "file", b"")
