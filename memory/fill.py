"""Fill a capacity with chunks worth the most: an exact knapsack for few kinds of items, on big-integer bitsets.

Note [method]
    Chunks come in few kinds (size, value), and nearly all are worth the same per byte. Those are the bulk: the sums of
    sizes that can be reached with them are the set bits of one integer, built by shift-or with doubling counts, so the
    best fill of any remaining room is one mask away. The other kinds are enumerated by branch and bound on top.
    Exact, up to three limits that real models do not reach: more than MAX_SPECIALS kinds with a value per byte of their
    own (the rest are taken for bulk), more than MAX_NODES branches (the best so far is used), and more room than
    MAX_BITS / kinds ** 2 units (then whole items are put in first, and the exact fill is for the room left).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd
from typing import NamedTuple

MAX_SPECIALS = 10
MAX_NODES = 2000
MAX_BITS = 1 << 26


class Item(NamedTuple):
    chunk_id: int
    nbytes: int
    value: int


class Kind(NamedTuple):
    """`num` items of the same size and value."""

    nbytes: int
    value: int
    num: int


def fill(items: Sequence[Item], capacity_nbytes: int) -> set[int]:
    """Choose items of the largest total value that fit. Among equals the first in `items` are chosen."""
    if sum(item.nbytes for item in items) <= capacity_nbytes:
        return {item.chunk_id for item in items}
    members: dict[tuple[int, int], list[int]] = {}
    for item in items:
        if item.nbytes <= capacity_nbytes:
            members.setdefault((item.nbytes, item.value), []).append(item.chunk_id)
    if not members:
        return set()
    keys = sorted(members)
    nums = best_nums(tuple(Kind(nbytes, value, len(members[nbytes, value])) for nbytes, value in keys), capacity_nbytes)
    return {chunk_id for key, num in zip(keys, nums, strict=True) for chunk_id in members[key][:num]}


@lru_cache(maxsize=512)
def best_nums(kinds: tuple[Kind, ...], capacity_nbytes: int) -> tuple[int, ...]:
    """How many items of each kind to take."""
    bulk, special = _split(kinds)
    search = _Search([kinds[i] for i in special], [kinds[i] for i in bulk], capacity_nbytes)
    special_nums, bulk_nums = search.run()
    nums = [0] * len(kinds)
    for i, num in zip([*special, *bulk], [*special_nums, *bulk_nums], strict=True):
        nums[i] = num
    return tuple(nums)


def _split(kinds: Sequence[Kind]) -> tuple[list[int], list[int]]:
    """Indices of the bulk (the commonest value per byte) and of the specials, best value per byte first."""
    rates = [_rate(kind) for kind in kinds]
    num_at: dict[tuple[int, int], int] = {}
    for kind, rate in zip(kinds, rates, strict=True):
        num_at[rate] = num_at.get(rate, 0) + kind.num
    value, nbytes = max(num_at, key=lambda rate: num_at[rate])

    def weight(i: int) -> float:  # what is lost at most when the kind is taken for bulk
        return abs(kinds[i].value - kinds[i].nbytes * value / nbytes) * kinds[i].num

    special = sorted((i for i, rate in enumerate(rates) if rate != (value, nbytes)), key=weight, reverse=True)
    special = sorted(special[:MAX_SPECIALS], key=lambda i: kinds[i].value / kinds[i].nbytes, reverse=True)
    bulk = [i for i in range(len(kinds)) if i not in special]
    bulk.sort(key=lambda i: rates[i] != (value, nbytes))  # the first one states the rate
    return bulk, special


def _rate(kind: Kind) -> tuple[int, int]:
    divisor = gcd(kind.value, kind.nbytes)
    return kind.value // divisor, kind.nbytes // divisor


class _Search:
    """Branch and bound over the special kinds; the bulk closes each branch."""

    def __init__(self, special: list[Kind], bulk: list[Kind], capacity_nbytes: int) -> None:
        self.special = special
        self.rate = _rate(bulk[0])
        self.capacity_nbytes = capacity_nbytes
        special_nbytes = sum(kind.nbytes * kind.num for kind in special)
        self.sums = Sums([(kind.nbytes, kind.num) for kind in bulk], capacity_nbytes, special_nbytes)
        bulk_value = sum(kind.nbytes * kind.num for kind in bulk) * self.rate[0] // self.rate[1]
        # At depth i: the value of all that is still open, and its best value per byte.
        self.open_value = [bulk_value + sum(k.value * k.num for k in special[i:]) for i in range(len(special) + 1)]
        rates = [self.rate, *(_rate(kind) for kind in special)]
        self.open_rate = [
            max([self.rate, *rates[i + 1 :]], key=lambda rate: rate[0] / rate[1]) for i in range(len(special) + 1)
        ]
        self.best_value = -1
        self.best: tuple[list[int], int] = ([0] * len(special), 0)
        self.num_nodes = 0

    def run(self) -> tuple[list[int], list[int]]:
        self._branch([], self.capacity_nbytes, 0)
        nums, bulk_nbytes = self.best
        return nums, self.sums.nums_for(bulk_nbytes)

    def _branch(self, nums: list[int], room_nbytes: int, value: int) -> None:
        self.num_nodes += 1
        depth = len(nums)
        rate = self.open_rate[depth]
        if value + min(self.open_value[depth], room_nbytes * rate[0] // rate[1]) <= self.best_value:
            return
        if depth == len(self.special):
            bulk_nbytes = self.sums.best_for(room_nbytes)
            value += bulk_nbytes * self.rate[0] // self.rate[1]
            if value > self.best_value:
                self.best_value, self.best = value, (list(nums), bulk_nbytes)
            return
        kind = self.special[depth]
        choices = range(min(kind.num, room_nbytes // kind.nbytes) + 1)
        if kind.value * self.rate[1] > self.rate[0] * kind.nbytes:
            choices = choices[::-1]
        for num in choices:
            if self.num_nodes > MAX_NODES and self.best_value >= 0:
                return
            self._branch([*nums, num], room_nbytes - num * kind.nbytes, value + num * kind.value)


class Sums:
    """The sums that (nbytes, num) items can reach, up to a capacity of which `reserve_nbytes` may go elsewhere."""

    def __init__(self, sizes: list[tuple[int, int]], capacity_nbytes: int, reserve_nbytes: int = 0) -> None:
        self._unit = gcd(*(nbytes for nbytes, _ in sizes))
        self._sizes = [nbytes // self._unit for nbytes, _ in sizes]
        self._put_in = [0] * len(sizes)
        nums = [num for _, num in sizes]
        room = min(capacity_nbytes // self._unit, sum(s * n for s, n in zip(self._sizes, nums, strict=True)))
        window = max(MAX_BITS // len(sizes) ** 2, 16 * max(self._sizes))
        spare = room - max(window, -(-reserve_nbytes // self._unit))
        ordered = sorted(range(len(sizes)), key=lambda i: self._sizes[i])
        middle = self._sizes[ordered[len(sizes) // 2]]
        for i in sorted(ordered, key=lambda i: abs(self._sizes[i] - middle)):  # the extremes combine to the most sums
            if spare > 0:
                self._put_in[i] = min(nums[i], spare // self._sizes[i])
                spare -= self._put_in[i] * self._sizes[i]
        self._base = sum(s * n for s, n in zip(self._sizes, self._put_in, strict=True))
        self._nums = [num - put_in for num, put_in in zip(nums, self._put_in, strict=True)]
        mask = (1 << (room - self._base + 1)) - 1
        self._reached = [1]
        for size, num in zip(self._sizes, self._nums, strict=True):
            bits, step = self._reached[-1], 1
            while num > 0 and size * step <= room:
                step = min(step, num)
                bits |= (bits << (size * step)) & mask
                num -= step
                step *= 2
            self._reached.append(bits)

    def best_for(self, room_nbytes: int) -> int:
        """The largest sum, in bytes, that fits into `room_nbytes`."""
        room = room_nbytes // self._unit - self._base
        if room < 0:
            return 0
        reached = self._reached[-1] & ((1 << (room + 1)) - 1)
        return (self._base + reached.bit_length() - 1) * self._unit

    def nums_for(self, sum_nbytes: int) -> list[int]:
        """How many items of each size make up a sum that `best_for` returned."""
        if sum_nbytes == 0:
            return [0] * len(self._sizes)
        left = sum_nbytes // self._unit - self._base
        nums = list(self._put_in)
        for i in reversed(range(len(self._sizes))):
            num = _first_reached(self._reached[i], left, self._sizes[i])
            nums[i] += num
            left -= num * self._sizes[i]
        assert left == 0
        return nums


def _first_reached(reached: int, start: int, step: int) -> int:
    """The smallest num such that bit `start - num * step` is set; there is one."""
    if reached >> start & 1:
        return 0
    bits = reached.to_bytes(reached.bit_length() // 8 + 1, "little")  # a test of a large integer's bit copies it
    num = 1
    while True:
        position = start - num * step
        assert position >= 0
        if position >> 3 < len(bits) and bits[position >> 3] >> (position & 7) & 1:
            return num
        num += 1
