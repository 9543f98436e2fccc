"""The one account of who holds how many bytes of which tier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from hetero.io.errors import OutOfMemoryError
from hetero.memory.sizes import format_need, format_size


@dataclass(frozen=True, slots=True)
class LedgerEvent:
    """One change, as the observer sees it: already booked, and nothing else can happen meanwhile."""

    kind: Literal["take", "give"]
    tier: str
    holder: str
    nbytes: int
    used_nbytes: int  # of the tier, after the event


@dataclass(slots=True)
class _Tier:
    limit_nbytes: int
    used_nbytes: int = 0
    peak_nbytes: int = 0
    holders: dict[str, int] = field(default_factory=dict)


class Ledger:
    """Book every byte before it is allocated; refuse what would exceed a tier's budget. Sizes are bytes.

    Thread-safe: one lock, held for a few dictionary operations and for the observer. Never call it from a finalizer
    (an alias's `on_death`): that may run inside this very lock.
    """

    def __init__(
        self,
        limits: Mapping[str, int],
        *,
        observer: Callable[[Ledger, LedgerEvent], None] | None = None,
    ) -> None:
        """`observer` is called under the lock after every event, on the thread that caused it. It may read this
        ledger; what it raises reaches the caller of `take` or `give`, with the event booked. `remedy(tier, holder,
        short_nbytes)` is called likewise, and says in sentences what to do where a budget is full."""
        self._tiers = {tier: _Tier(limit) for tier, limit in limits.items()}
        self._notes: dict[str, int] = {}
        self._observer = observer
        self.remedy: Callable[[str, str, int], str] = _raise_the_budget
        self._lock = threading.RLock()

    def take(self, tier: str, holder: str, nbytes: int) -> None:
        """Book `nbytes` more for `holder`. Raises OutOfMemoryError, with nothing booked, when they do not fit."""
        assert nbytes >= 0, f"{holder} takes {nbytes=}"
        with self._lock:
            account = self._tiers[tier]
            if account.used_nbytes + nbytes > account.limit_nbytes:
                raise self._out_of_memory(tier, holder, nbytes)
            account.used_nbytes += nbytes
            account.peak_nbytes = max(account.peak_nbytes, account.used_nbytes)
            account.holders[holder] = account.holders.get(holder, 0) + nbytes
            self._tell("take", tier, holder, nbytes)

    def give(self, tier: str, holder: str, nbytes: int) -> None:
        """Book `nbytes` of `holder` as free again, after the memory itself was freed."""
        with self._lock:
            account = self._tiers[tier]
            held = account.holders.get(holder, 0)
            assert 0 <= nbytes <= held, f"{holder} gives {nbytes=} of the {held} it holds in {tier}"
            account.used_nbytes -= nbytes
            account.holders[holder] = held - nbytes
            if held == nbytes:
                account.holders.pop(holder, None)
            self._tell("give", tier, holder, nbytes)

    def correct(self, tier: str, holder: str, nbytes: int) -> None:
        """Set what a holder has, when an interrupt fell between memory and its booking. No limit is checked."""
        with self._lock:
            held = self._tiers[tier].holders.get(holder, 0)
            if nbytes < held:
                self.give(tier, holder, held - nbytes)
            elif nbytes > held:
                account = self._tiers[tier]
                account.used_nbytes += nbytes - held
                account.peak_nbytes = max(account.peak_nbytes, account.used_nbytes)
                account.holders[holder] = nbytes
                self._tell("take", tier, holder, nbytes - held)

    @contextmanager
    def hold(self, tier: str, holder: str, nbytes: int) -> Iterator[None]:
        """Take for the length of a `with` block (scratch, staging)."""
        self.take(tier, holder, nbytes)
        try:
            yield
        finally:
            self.give(tier, holder, nbytes)

    def can_take(self, tier: str, nbytes: int) -> bool:
        """Say whether a `take` would fit now. Another thread may be quicker."""
        return nbytes <= self.free(tier)

    def limit(self, tier: str) -> int:
        return self._tiers[tier].limit_nbytes

    def used(self, tier: str) -> int:
        return self._tiers[tier].used_nbytes

    def peak(self, tier: str) -> int:
        """Return the most that was ever in use at one moment."""
        return self._tiers[tier].peak_nbytes

    def free(self, tier: str) -> int:
        account = self._tiers[tier]
        return account.limit_nbytes - account.used_nbytes

    def tiers(self) -> tuple[str, ...]:
        return tuple(self._tiers)

    def holders(self, tier: str) -> dict[str, int]:
        """Return who holds how much now, the largest first."""
        with self._lock:
            held = list(self._tiers[tier].holders.items())
        return dict(sorted(held, key=lambda item: (-item[1], item[0])))

    def held(self, tier: str, holder: str) -> int:
        """Return how much one holder has now."""
        return self._tiers[tier].holders.get(holder, 0)

    def note(self, name: str, nbytes: int) -> None:
        """Write down bytes that no budget covers (the interpreter's baseline), for reports."""
        with self._lock:
            self._notes[name] = nbytes

    def notes(self) -> dict[str, int]:
        with self._lock:
            return dict(self._notes)

    def _tell(self, kind: Literal["take", "give"], tier: str, holder: str, nbytes: int) -> None:
        if self._observer is not None:
            self._observer(self, LedgerEvent(kind, tier, holder, nbytes, self._tiers[tier].used_nbytes))

    def _out_of_memory(self, tier: str, holder: str, nbytes: int) -> OutOfMemoryError:
        account = self._tiers[tier]
        free = account.limit_nbytes - account.used_nbytes
        largest, held = next(iter(self.holders(tier).items()), (None, 0))
        owner = f"the largest holder is {largest!r} with {format_size(held)}" if largest else "nothing is held yet"
        return OutOfMemoryError(
            f"the {tier} budget is full: {holder!r} asks for {format_size(nbytes)}, and {format_size(free)} of "
            f"{format_size(account.limit_nbytes)} are free ({owner}). {self.remedy(tier, holder, nbytes - free)}",
            tier=tier,
            requested_nbytes=nbytes,
            free_nbytes=free,
            largest_holder=largest,
        )


def _raise_the_budget(tier: str, holder: str, short_nbytes: int) -> str:
    return f"Raise {tier}_memory by at least {format_need(short_nbytes)}."
