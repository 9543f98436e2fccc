"""A clock for plans that follow measured times: whatever it says must be right."""

from __future__ import annotations

import random


class Clock:
    """Goes on by steps of any size, from a nanosecond to ten seconds."""

    def __init__(self, seed: int) -> None:
        self._random, self._now_s = random.Random(seed), 0.0

    def __call__(self) -> float:
        self._now_s += 10 ** self._random.uniform(-9, 1)
        return self._now_s
