"""The exact fill: against every choice, and within its limits."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.memory import fill as fill_module
from hetero.memory.fill import Item, Kind, Sums, best_nums, fill

kinds = st.lists(
    st.builds(Kind, st.integers(1, 12), st.integers(0, 20), st.integers(1, 3)),
    min_size=1,
    max_size=4,
    unique_by=lambda kind: (kind.nbytes, kind.value),
).map(tuple)


def value_of(some: tuple[Kind, ...], nums: tuple[int, ...]) -> int:
    return sum(kind.value * num for kind, num in zip(some, nums, strict=True))


def nbytes_of(some: tuple[Kind, ...], nums: tuple[int, ...]) -> int:
    return sum(kind.nbytes * num for kind, num in zip(some, nums, strict=True))


@settings(max_examples=300, deadline=None)
@given(some=kinds, capacity=st.integers(0, 60))
def test_the_value_is_the_best_of_all_choices(some: tuple[Kind, ...], capacity: int) -> None:
    nums = best_nums(some, capacity)
    assert nbytes_of(some, nums) <= capacity
    every = product(*(range(kind.num + 1) for kind in some))
    assert value_of(some, nums) == max(value_of(some, c) for c in every if nbytes_of(some, c) <= capacity)


@settings(max_examples=200, deadline=None)
@given(some=kinds, capacity=st.integers(0, 60))
def test_past_its_limits_it_still_fits_and_leaves_no_room_for_another(some: tuple[Kind, ...], capacity: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fill_module, "MAX_SPECIALS", 1)
        patch.setattr(fill_module, "MAX_BITS", 1)
        best_nums.cache_clear()
        nums = best_nums(some, capacity)
    best_nums.cache_clear()
    assert nbytes_of(some, nums) <= capacity
    assert all(0 <= num <= kind.num for kind, num in zip(some, nums, strict=True))


def test_equal_chunks_are_taken_from_the_front_and_others_fill_the_rest() -> None:
    items = [*(Item(i, 40, 40) for i in range(10)), Item(10, 30, 30), Item(11, 7, 7)]
    assert fill(items, 117) == {0, 1, 10, 11}
    assert fill(items, 39) == {10, 11}
    assert fill(items, 6) == set()
    assert fill(items, 437) == set(range(12))


def test_a_thousand_chunks_of_odd_sizes_fill_a_room_to_the_last_page() -> None:
    items = [Item(i, 4096 * (6000 + i), 4096 * (6000 + i)) for i in range(1000)]
    room = 4096 * 3_123_457
    chosen = fill(items, room)
    assert sum(items[i].nbytes for i in chosen) == room


def test_sums_are_made_up_of_what_there_is() -> None:
    sums = Sums([(6, 2), (10, 1)], 100)
    assert [sums.best_for(room) for room in (5, 6, 11, 15, 21, 40)] == [0, 6, 10, 12, 16, 22]
    assert sums.nums_for(16) == [1, 1]
    assert sums.nums_for(22) == [2, 1]
