"""Spread what is streamed evenly over a pass, so that the links always have compute to hide behind."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple


class Place(NamedTuple):
    """A chunk in order of first use; `at` is when in the pass that is, from 0 to 1. Places of one kind are alike."""

    chunk_id: int
    nbytes: int
    at: float
    kind: Hashable


def spread_evenly(places: Sequence[Place], num_of_kind: Mapping[Hashable, int]) -> set[int]:
    """Choose `num_of_kind` places of every kind so that the chosen bytes grow as evenly with `at` as they can.

    Error diffusion: a place is chosen when its middle byte is due. Kinds that are chosen whole are part of the growth.
    """
    left: dict[Hashable, int] = {}
    total_nbytes = 0
    for place in places:
        left[place.kind] = left.get(place.kind, 0) + 1
        if left[place.kind] <= num_of_kind.get(place.kind, 0):
            total_nbytes += place.nbytes
    wanted = dict(num_of_kind)
    chosen: set[int] = set()
    chosen_nbytes = 0
    for place in places:
        num, left[place.kind] = wanted.get(place.kind, 0), left[place.kind] - 1
        is_due = 2 * chosen_nbytes + place.nbytes <= 2 * total_nbytes * place.at
        if num > 0 and (is_due or num > left[place.kind]):
            chosen.add(place.chunk_id)
            chosen_nbytes += place.nbytes
            wanted[place.kind] = num - 1
    return chosen
