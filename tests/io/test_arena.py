"""Arenas: exact size, alignment, huge pages, and never unmapped under somebody's feet."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap

import psutil
import pytest

from hetero.io.arena import HUGE_PAGE_NBYTES, Arena, hold_range, release_range
from hetero.io.errors import ConfigError, OutOfMemoryError

MIB = 1 << 20


def is_mapped(address: int) -> bool:
    with open("/proc/self/maps", encoding="ascii") as maps:
        for line in maps:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if start <= address < end:
                return True
    return False


def huge_pages_allowed() -> bool:
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled", encoding="ascii") as setting:
            return "[never]" not in setting.read()
    except OSError:
        return False


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, HUGE_PAGE_NBYTES, 5 * MIB + 1])
@pytest.mark.parametrize("huge_pages", [True, False], ids=["huge", "ordinary"])
def test_size_alignment_and_zeros(nbytes: int, huge_pages: bool) -> None:
    with Arena(nbytes, name="test", huge_pages=huge_pages) as arena:
        assert arena.nbytes == -(-nbytes // 4096) * 4096
        assert arena.address % HUGE_PAGE_NBYTES == 0
        assert arena.array.shape == (arena.nbytes,)
        assert arena.array.ctypes.data == arena.address
        assert not arena.array.any()
        arena.array[-1] = 7
        assert arena.array[-1] == 7


def test_takes_exactly_its_size_of_ram_and_gives_it_back() -> None:
    process = psutil.Process()
    Arena(MIB, name="warm up").close()
    before = process.memory_info().rss
    arena = Arena(64 * MIB, name="test")
    assert abs(process.memory_info().rss - before - 64 * MIB) < MIB
    arena.close()
    assert abs(process.memory_info().rss - before) < MIB


def test_huge_nbytes_counts_this_arena_only() -> None:
    with Arena(8 * MIB, name="huge") as huge, Arena(8 * MIB, name="ordinary", huge_pages=False) as ordinary:
        assert ordinary.huge_nbytes in (0, 8 * MIB)  # 8 MiB where the machine is set to "always"
        assert huge.huge_nbytes <= 8 * MIB
        if huge_pages_allowed():
            assert huge.huge_nbytes > 0


def test_neighbours_are_fenced_by_inaccessible_pages() -> None:
    with Arena(HUGE_PAGE_NBYTES, name="test") as arena, open("/proc/self/maps", encoding="ascii") as maps:
        modes = {line.split()[0]: line.split()[1] for line in maps}
        span = f"{arena.address:x}-{arena.address + arena.nbytes:x}"
        assert modes[span].startswith("rw")
        end = arena.address + arena.nbytes
        assert [mode for place, mode in modes.items() if place.startswith(f"{end:x}-")] == ["---p"]


def test_closing_with_live_views_keeps_the_memory_until_they_die(caplog: pytest.LogCaptureFixture) -> None:
    arena = Arena(MIB, name="viewed")
    address = arena.address
    view = arena.array[100:200]
    view[:] = 42
    with caplog.at_level(logging.WARNING, logger="hetero.io"):
        arena.close()
        arena.close()
    assert [record.getMessage() for record in caplog.records if "viewed" in record.getMessage()] != []
    assert (view == 42).all()
    assert is_mapped(address)
    del view
    assert not is_mapped(address)


def test_closed_arena_has_no_array() -> None:
    arena = Arena(MIB, name="test")
    states = [arena.closed]
    arena.close()
    states.append(arena.closed)
    assert states == [False, True]
    assert arena.huge_nbytes == 0
    with pytest.raises(ConfigError, match="closed"):
        _ = arena.array


def test_a_held_range_outlives_close_until_it_is_released() -> None:
    arena, other = Arena(MIB, name="held"), Arena(MIB, name="other")
    token = hold_range(arena.address + 4096, 10)
    address = arena.address
    arena.close()
    other.close()
    assert is_mapped(address)
    assert not is_mapped(other.address)
    release_range(token)
    assert not is_mapped(address)


def test_two_holds_on_one_arena_both_count() -> None:
    arena = Arena(MIB, name="held twice")
    first, second = hold_range(arena.address, 1), hold_range(arena.address + MIB - 1, 1)
    arena.close()
    release_range(first)
    assert is_mapped(arena.address)
    release_range(second)
    assert not is_mapped(arena.address)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_no_size_is_refused(nbytes: int) -> None:
    with pytest.raises(ConfigError, match="nbytes"):
        Arena(nbytes, name="test")


def test_more_than_the_address_space_is_an_out_of_memory_error() -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        Arena(1 << 50, name="too big")
    assert caught.value.tier == "cpu"
    assert caught.value.requested_nbytes == 1 << 50
    assert "too big" in str(caught.value)


def test_a_forked_child_has_no_copy_and_unmaps_nothing() -> None:
    # In a process of its own: forking one that has threads, as the test runner's may, is not allowed.
    script = textwrap.dedent("""
        import ctypes, os
        from hetero.io.arena import Arena
        arena = Arena(1 << 20, name="parent's")
        arena.array[:] = 9
        child = os.fork()
        if child == 0:
            def is_mapped():
                with open("/proc/self/maps") as maps:
                    return any(int(line.split("-")[0], 16) == arena.address for line in maps)
            inherited = is_mapped()
            mmap = ctypes.CDLL(None).mmap
            mmap.restype = ctypes.c_void_p
            mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
            assert mmap(arena.address, 4096, 1, 0x32, -1, 0) == arena.address  # somebody else's page, at the same place
            arena.close()
            os._exit(2 * inherited + (not is_mapped()))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert (arena.array == 9).all()
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ})
    assert (done.returncode, done.stderr) == (0, "")
