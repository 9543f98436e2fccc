"""The scratch store: extents, budgets, and that folders of dead runs go and nothing else ever does."""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.io.arena import Arena
from hetero.io.engine import Engine, Request
from hetero.io.errors import ConfigError, HeteroError, OutOfMemoryError
from hetero.io.filesystem import filesystem_type, why_unfit_for_scratch
from hetero.io.scratch import FreeList, ScratchStore
from hetero.io.scratch_folder import DATA_NAME, MARKER_NAME, Marker, RunFolder, process_start_time, sweep_stale

no_leaks = pytest.mark.usefixtures("no_leaks")
PAGE = 4096


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:  # the one that listed the folder
        return ""


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@contextmanager
def other_process(folder: Path, *, then: str = "input()") -> Iterator[subprocess.Popen[str]]:
    """A process with a store of 8 pages in `folder`; yielded when the store is there."""
    script = f"""
import sys
from hetero.io.scratch import ScratchStore
store = ScratchStore(sys.argv[1], 8 * {PAGE})
print(store.folder, flush=True)
{then}
"""
    command, pipe = [sys.executable, "-c", script, str(folder)], subprocess.PIPE
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(str(folder))
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was killed, to be copied."""
    folder = tmp_path_factory.mktemp("killed")
    with other_process(folder) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    (name,) = names(folder)
    return folder / name


@pytest.fixture
def left(killed_run: Path, tmp_path: Path) -> Path:
    """The folder of a dead run, in `tmp_path`."""
    return Path(shutil.copytree(killed_run, tmp_path / killed_run.name))


# --- extents ---------------------------------------------------------------------------------------------------------


def test_the_file_has_its_size_and_its_blocks_from_the_start(tmp_path: Path) -> None:
    with ScratchStore(tmp_path, 100 * PAGE + 5) as store:
        status = os.stat(store.path)
        assert store.nbytes == status.st_size == 100 * PAGE
        assert status.st_blocks * 512 >= store.nbytes
        assert status.st_mode & 0o777 == 0o600
        assert os.stat(store.folder).st_mode & 0o777 == 0o700
        assert names(store.folder) == [MARKER_NAME, DATA_NAME]
    assert names(tmp_path) == []


@no_leaks
def test_the_budget_is_a_limit(tmp_path: Path) -> None:
    with ScratchStore(tmp_path, 10 * PAGE) as store:
        small = store.allocate(1, holder="moments")
        large = store.allocate(6 * PAGE, holder="weights")
        assert (small.nbytes, large.offset, store.free_nbytes) == (PAGE, PAGE, 3 * PAGE)
        assert store.can_allocate(3 * PAGE)
        assert not store.can_allocate(3 * PAGE + 1)
        with pytest.raises(OutOfMemoryError, match="gradients needs 16384 bytes") as caught:
            store.allocate(3 * PAGE + 1, holder="gradients")
        error = caught.value
        assert (error.tier, error.requested_nbytes, error.free_nbytes) == ("disk", 4 * PAGE, 3 * PAGE)
        assert error.largest_holder == "weights"
        store.free(small)
        with pytest.raises(OutOfMemoryError, match=r"16384 of 40960 are free, the longest run 12288"):
            store.allocate(4 * PAGE, holder="gradients")
        store.free(large)
        assert store.allocate(10 * PAGE, holder="all").offset == 0


def test_what_is_not_allocated_cannot_be_freed(tmp_path: Path) -> None:
    with ScratchStore(tmp_path, 10 * PAGE) as store, ScratchStore(tmp_path, 10 * PAGE) as other:
        extent = store.allocate(PAGE, holder="x")
        with pytest.raises(HeteroError, match="not allocated"):
            other.free(extent)
        store.free(extent)
        with pytest.raises(HeteroError, match="not allocated"):
            store.free(extent)
        with pytest.raises(HeteroError, match="at least one byte"):
            store.allocate(0, holder="x")
    with pytest.raises(HeteroError, match="is closed"):
        store.allocate(PAGE, holder="x")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 9), st.integers(-8, -1)), max_size=60))
def test_free_list_against_a_plain_model(steps: list[int]) -> None:
    """Positive: take that many. Negative: give the nth oldest back. The model is one flag per unit."""
    num_units = 30
    free_list, is_free, taken = FreeList(num_units), [True] * num_units, list[tuple[int, int]]()
    for step in steps:
        if step > 0:
            expected = next((i for i in range(num_units - step + 1) if all(is_free[i : i + step])), None)
            offset = free_list.take(step)
            assert offset == expected
            if offset is not None:
                is_free[offset : offset + step] = [False] * step
                taken.append((offset, step))
        elif -step <= len(taken):
            offset, length = taken.pop(-step - 1)
            free_list.give(offset, length)
            is_free[offset : offset + length] = [True] * length
        assert free_list.free_nbytes == sum(is_free)
        runs = "".join("x" if free else " " for free in is_free).split()
        assert [length for _, length in free_list.runs] == [len(run) for run in runs]
        assert free_list.largest_nbytes == max((len(run) for run in runs), default=0)


@no_leaks
def test_bytes_written_through_the_engine_come_back(tmp_path: Path) -> None:
    with Engine() as engine, ScratchStore(tmp_path, 8 * PAGE, engine=engine) as store:
        assert store.file is not None
        store.allocate(PAGE, holder="first")
        extent = store.allocate(2 * PAGE, holder="second")
        arena = Arena(2 * PAGE, name="test")
        arena.array[:] = 7
        (written,) = engine.submit([Request(store.file, extent.offset, extent.nbytes, arena.address, write=True)])
        assert written.result() == 2 * PAGE
        arena.array[:] = 0
        (read,) = engine.submit([Request(store.file, extent.offset, extent.nbytes, arena.address)])
        assert read.result() == 2 * PAGE
        assert (arena.array == 7).all()
        assert store.path.read_bytes()[:PAGE] == bytes(PAGE)
        arena.close()
    assert names(tmp_path) == []


# --- the end of a run ------------------------------------------------------------------------------------------------


@no_leaks
def test_close_is_idempotent_and_leaves_the_users_files(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("keep")
    store = ScratchStore(tmp_path, PAGE)
    (store.folder / "also-mine").write_text("keep")
    store.close()
    store.close()
    assert names(store.folder) == ["also-mine"]
    assert (tmp_path / "mine").read_text() == "keep"


@no_leaks
def test_a_store_nobody_holds_is_removed(tmp_path: Path) -> None:
    with Engine() as engine:
        store = ScratchStore(tmp_path, PAGE, engine=engine)
        path = str(store.path)
        del store
        gc.collect()
        assert names(tmp_path) == []
        # An open descriptor would keep the blocks on the disk.
        assert not [link for link in os.listdir("/proc/self/fd") if path in _target(link)]


@pytest.mark.parametrize("ending", ["pass", "sys.exit(3)", "raise SystemError", "store.close()"])
def test_a_process_that_ends_takes_its_folder_along(tmp_path: Path, ending: str) -> None:
    with other_process(tmp_path, then=f"input(); {ending}") as process:
        assert len(names(tmp_path)) == 1
        process.communicate("\n")
    assert names(tmp_path) == []


def test_a_forked_child_does_not_remove_its_parents_folder(tmp_path: Path) -> None:
    fork = "import os\npid = os.fork()\nif not pid: store.close(); sys.exit()\nos.waitpid(pid, 0)"
    then = f"{fork}\nprint('alive')\ninput()"
    with other_process(tmp_path, then=then) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "alive\n"
        (name,) = names(tmp_path)
        assert names(tmp_path / name) == [MARKER_NAME, DATA_NAME]
        assert sweep_stale(tmp_path) == []


def test_the_next_run_removes_what_a_killed_one_left(tmp_path: Path, left: Path) -> None:
    assert names(left) == [MARKER_NAME, DATA_NAME]
    with ScratchStore(tmp_path, PAGE) as store:
        assert names(tmp_path) == [store.folder.name]
        assert left != store.folder


@no_leaks
def test_two_processes_share_a_folder(tmp_path: Path) -> None:
    with other_process(tmp_path) as first, other_process(tmp_path), ScratchStore(tmp_path, PAGE) as store:
        assert len(names(tmp_path)) == 3
        assert sweep_stale(tmp_path) == []
        first.kill()
        first.wait()
        assert len(sweep_stale(tmp_path)) == 1
        assert len(names(tmp_path)) == 2
        assert store.path.exists()


@no_leaks
def test_two_sweeps_at_once_remove_a_folder_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: Path) -> None:
    flock, inner = fcntl.flock, list[Path]()

    def flock_late(fd: int, operation: int) -> None:
        if not inner:
            inner.append(left)
            assert sweep_stale(tmp_path) == [left]
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock_late)
    assert sweep_stale(tmp_path) == []
    assert names(tmp_path) == []


def test_a_sweep_that_was_cut_short_is_finished_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: Path
) -> None:
    unlink = os.unlink

    def unlink_once(path: Any, **kwargs: Any) -> None:
        unlink(path, **kwargs)
        raise OSError(errno.EIO, "injected")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink_once)
        assert sweep_stale(tmp_path) == []
    assert names(left) == [MARKER_NAME]
    assert sweep_stale(tmp_path) == [left]


# --- what is never removed -------------------------------------------------------------------------------------------


def rewrite_marker(folder: Path, **changes: Any) -> None:
    fields = json.loads((folder / MARKER_NAME).read_bytes())
    (folder / MARKER_NAME).write_text(json.dumps({**fields, **changes}))


def add_a_file(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")


def add_a_folder(folder: Path) -> None:
    (folder / DATA_NAME).unlink()
    (folder / DATA_NAME).mkdir()


def link_the_data(folder: Path) -> None:
    (folder.parent / "precious").write_text("mine")
    (folder / DATA_NAME).unlink()
    (folder / DATA_NAME).symlink_to(folder.parent / "precious")


def link_the_marker(folder: Path) -> None:
    os.rename(folder / MARKER_NAME, folder.parent / "marker")
    (folder / MARKER_NAME).symlink_to(folder.parent / "marker")


def link_the_folder(folder: Path) -> None:
    os.rename(folder, folder.parent / "elsewhere")
    folder.symlink_to(folder.parent / "elsewhere")


def rename(folder: Path) -> None:
    os.rename(folder, folder.parent / "hetero-scratch-1-0123456789abcdef")


def make_marker_a_fifo(folder: Path) -> None:
    (folder / MARKER_NAME).unlink()
    os.mkfifo(folder / MARKER_NAME)


KEPT: dict[str, Any] = {
    "no-marker": lambda folder: (folder / MARKER_NAME).unlink(),
    "empty-marker": lambda folder: (folder / MARKER_NAME).write_bytes(b""),
    "other-json": lambda folder: (folder / MARKER_NAME).write_text("[1]"),
    "deep-json": lambda folder: (folder / MARKER_NAME).write_text("[" * 4000),
    "other-format": lambda folder: rewrite_marker(folder, format="someone-else"),
    "later-version": lambda folder: rewrite_marker(folder, version=2),
    "unknown-field": lambda folder: rewrite_marker(folder, more=1),
    "text-pid": lambda folder: rewrite_marker(folder, pid="1"),
    "of-another-folder": lambda folder: rewrite_marker(folder, name="hetero-scratch-1-0000000000000000"),
    "renamed": rename,
    "another-machine": lambda folder: rewrite_marker(folder, boot_id="other", hostname="other"),
    "process-alive": lambda folder: rewrite_marker(
        folder, pid=os.getppid(), start_time=process_start_time(os.getppid())
    ),
    "more-files": add_a_file,
    "data-is-a-folder": add_a_folder,
    "data-is-a-link": link_the_data,
    "marker-is-a-link": link_the_marker,
    "marker-is-a-fifo": make_marker_a_fifo,
    "folder-is-a-link": link_the_folder,
}


def tree(folder: Path) -> dict[str, Any]:
    return {str(path): path.lstat().st_ino for path in folder.rglob("*")}


@pytest.mark.parametrize("case", KEPT)
def test_a_folder_in_doubt_is_kept(case: str, tmp_path: Path, left: Path) -> None:
    KEPT[case](left)
    before, descriptors = tree(tmp_path), os.listdir("/proc/self/fd")
    assert sweep_stale(tmp_path) == []
    with ScratchStore(tmp_path, PAGE):
        pass
    assert tree(tmp_path) == before
    assert os.listdir("/proc/self/fd") == descriptors


def test_another_boot_of_this_machine_is_dead(tmp_path: Path, left: Path) -> None:
    # Its pid may well be in use again after a reboot.
    rewrite_marker(left, boot_id="earlier", pid=os.getppid(), start_time=process_start_time(os.getppid()))
    assert sweep_stale(tmp_path) == [left]


def test_a_pid_in_use_again_does_not_keep_a_folder(tmp_path: Path, left: Path) -> None:
    rewrite_marker(left, pid=os.getppid(), start_time=1)
    assert sweep_stale(tmp_path) == [left]


@pytest.mark.parametrize("name", ["hetero-scratch", "hetero-scratch-1-0123456789abcdeF", "x-hetero-scratch-1-0" * 2])
def test_other_names_are_not_even_opened(name: str, tmp_path: Path, left: Path) -> None:
    rewrite_marker(left, name=name)
    os.rename(left, tmp_path / name)
    assert sweep_stale(tmp_path) == []


def test_a_run_that_is_just_starting_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its marker exists before it is locked: a sweep at that moment must neither remove it nor make it fail."""
    flock, swept = fcntl.flock, list[list[Path]]()

    def flock_late(fd: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        swept.append(sweep_stale(tmp_path))
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock_late)
    run = RunFolder(tmp_path)
    assert swept == [[]]
    assert names(run.path) == [MARKER_NAME]
    run.remove()


def test_marker_round_trip() -> None:
    marker = Marker.of_this_process("name")
    assert Marker.from_json(marker.to_json()) == marker
    assert marker.start_time == process_start_time(os.getpid())


# --- folders that will not do ----------------------------------------------------------------------------------------


@no_leaks
def test_memory_file_systems_are_refused_unless_allowed() -> None:
    folder = Path("/dev/shm")
    if filesystem_type(folder) != "tmpfs":
        pytest.skip("/dev/shm is not a tmpfs here")
    with pytest.raises(ConfigError, match="/dev/shm is on tmpfs, which is memory"):
        ScratchStore(folder, PAGE)
    with ScratchStore(folder, PAGE, allow_any_filesystem=True) as store:
        assert store.path.exists()
    assert not store.folder.exists()


MOUNTS = r"""
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 master:2 - ext4 /dev/vda rw
28 27 0:30 / /home rw - nfs4 server:/home rw
29 28 0:31 / /home/me/disk rw - xfs /dev/sdb rw
30 27 0:32 / /mnt/with\040space rw - fuse.sshfs me@host: rw
31 27 0:33 / /shm rw - tmpfs tmpfs rw
32 31 0:34 / /shm rw - btrfs /dev/sdc rw
not a mount line
"""


@pytest.mark.parametrize(
    ("path", "type_name"),
    [("/", "ext4"), ("/homes", "ext4"), ("/home", "nfs4"), ("/home/me", "nfs4"), ("/home/me/disk/x", "xfs"),
     ("/home/me/diskette", "nfs4"), ("/mnt/with space/x", "fuse.sshfs"), ("/shm/x", "btrfs")],
)  # fmt: skip
def test_the_longest_and_latest_mount_counts(path: str, type_name: str) -> None:
    assert filesystem_type(path, mountinfo=MOUNTS) == type_name


def test_links_are_resolved_before_the_mount_is_looked_up(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/home/me/disk")
    assert filesystem_type(tmp_path / "link" / "x", mountinfo=MOUNTS) == "xfs"


@pytest.mark.parametrize("name", ["tmpfs", "ramfs", "nfs", "nfs4", "cifs", "9p", "fuse.sshfs", "fuse.rclone", "ceph"])
def test_unfit_file_systems(name: str) -> None:
    assert name in (why_unfit_for_scratch(name) or "")


@pytest.mark.parametrize("name", ["ext4", "xfs", "btrfs", "overlay", "fuseblk", "zfs", None])
def test_fit_file_systems(name: str | None) -> None:
    assert why_unfit_for_scratch(name) is None


def test_too_little_space_is_found_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs 1125899906842624 bytes \(1048576.0 GiB\), .* has \d+ free"):
        ScratchStore(tmp_path, 1 << 50)
    assert names(tmp_path) == []


@no_leaks
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_space_that_goes_while_allocating_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=os.strerror(number)):
        ScratchStore(tmp_path, PAGE)
    assert names(tmp_path) == []


@no_leaks
def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "gone" / "deeper", tmp_path / "nul\0"):
        with pytest.raises(ConfigError, match="cannot be used"):
            ScratchStore(folder, PAGE)
    for nbytes in (0, -1, PAGE - 1):
        with pytest.raises(ConfigError, match="at least 4096 bytes"):
            ScratchStore(tmp_path, nbytes)
    with ScratchStore(tmp_path / "new", PAGE):
        pass
    assert names(tmp_path / "new") == []


@no_leaks
def test_an_engine_that_cannot_open_the_file_leaves_nothing(tmp_path: Path) -> None:
    engine = Engine()
    engine.close()
    with pytest.raises(HeteroError):
        ScratchStore(tmp_path, PAGE, engine=engine)
    assert names(tmp_path) == []
