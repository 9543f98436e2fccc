"""What budgets a wrapped model needs, and what to do when they do not hold it."""

from __future__ import annotations

from collections.abc import Callable, Collection

from hetero.copies import COPIES
from hetero.memory.activations import ACTIVATIONS, Policy
from hetero.memory.budget import Ledger
from hetero.memory.gradients import GRADIENTS
from hetero.memory.homes import WEIGHTS
from hetero.memory.sizes import format_need, format_size
from hetero.placing import RING, Placing
from hetero.planning import TooSmallError


class Needs:
    """Adds up what a model needs at least, in bytes per tier. It changes nothing."""

    def __init__(
        self,
        placing: Placing,
        ledger: Ledger,
        *,
        bounce_nbytes: int,
        others_nbytes: int,
        trainable_nbytes: int,
        activations: Policy,
        in_use: Callable[[], Collection[int]],
    ) -> None:
        """`others_nbytes` never move; `in_use` tells the chunks that the pass under way looks at itself."""
        self._placing, self._ledger = placing, ledger
        self._bounce_nbytes, self._others_nbytes = bounce_nbytes, others_nbytes
        self._trainable_nbytes = trainable_nbytes
        self._activations, self._in_use = activations, in_use

    def least(self, *, training: bool) -> dict[str, int]:
        """The smallest budgets that work: one module's weights at a time, beside what never moves. Training needs all
        gradients as well, and what autograd saves on top."""
        placing = self._placing
        total = sum(chunk.nbytes for chunk in placing.chunks)
        kept = sum(chunk.nbytes for chunk in placing.watched())
        can_stream = placing.homes.has_disk
        needs = {"cpu": self._bounce_nbytes}
        if placing.first == "gpu":
            needs["gpu"] = self._others_nbytes + min(total, placing.ring_nbytes)
            needs["cpu"] += kept + min(total - kept, placing.staging_nbytes) if can_stream else total
        else:
            rest = min(total - kept, placing.ring_nbytes) if can_stream else total - kept
            needs["cpu"] += self._others_nbytes + kept + rest
        if training:
            needs[placing.first] += self._trainable_nbytes
            if placing.is_remote:  # gradients of what streams go home
                needs["cpu"] += sum(chunk.trainable_nbytes for chunk in placing.chunks)
        return needs

    def check(self) -> None:
        """Refuse budgets that cannot hold even a forward. Raises TooSmallError."""
        needs, has = self.least(training=False), {tier: self._ledger.limit(tier) for tier in self._ledger.tiers()}
        if all(nbytes <= has[tier] for tier, nbytes in needs.items()):
            return
        lines = [
            f"{tier}_memory is {has[tier]} bytes, it needs {need} ({format_need(need)})"
            for tier, need in needs.items()
            if need > has[tier]
        ]
        training = ""
        if self._trainable_nbytes:
            training = f", to train it {_as_options(self.least(training=True))} beside what autograd saves"
        advice = "" if self._placing.homes.has_disk else '; with disk="FOLDER" weights can go there'
        raise TooSmallError(
            f"the budgets are too small for this model: {'; '.join(lines)}. The smallest that works for a forward pass "
            f"is {_as_options(needs)}{training}{advice}. {self._reason_for_kept('cpu')}".rstrip(),
            needs,
        )

    def note_on_training(self) -> str:
        """A sentence for the plan before any training."""
        needs = self.least(training=True)
        lacks = [tier for tier, nbytes in needs.items() if nbytes > self._ledger.limit(tier)]
        fits = f", which do not fit: it needs {_as_options(needs)} at least" if lacks else ""
        return f"training adds {format_size(self._trainable_nbytes)} of gradients, and what autograd saves{fits}"

    def remedy(self, tier: str, holder: str, short_nbytes: int) -> str:
        """What to do when `holder` lacks bytes of a tier, in sentences."""
        ways = []
        is_full_below = tier == "cpu" or not self._ledger.can_take("cpu", short_nbytes)
        if is_full_below and holder in (ACTIVATIONS, COPIES, GRADIENTS, RING, WEIGHTS):
            what = "weights" if self._activations == "keep" else "weights and what autograd saves"
            if not self._placing.homes.has_disk:
                ways.append(f'give disk="FOLDER", where {what} can go')
            if tier == "gpu":
                ways.append(f"raise cpu_memory, where {what} can go")
        ways.append(f"raise {tier}_memory by at least {format_need(short_nbytes)}")
        if holder == ACTIVATIONS:
            if self._activations == "keep":
                ways.append('let them move out with activations="auto"')
            ways.append("use a smaller batch")
        text = f"{', or '.join(ways)}."
        sentences = [text[0].upper() + text[1:]]
        if holder == GRADIENTS:
            sentences.append(
                f"Training keeps all gradients in memory ({format_size(self._trainable_nbytes)}): the smallest budgets "
                f"for it are {_as_options(self.least(training=True))}, and what autograd saves comes on top. A forward "
                "that is not trained needs none within torch.no_grad()."
            )
        if holder in (ACTIVATIONS, GRADIENTS):
            sentences.append(_HOW_MUCH)
        sentences.append(self._reason_for_kept(tier))
        return " ".join(sentences).rstrip()

    def _reason_for_kept(self, tier: str) -> str:
        """A sentence about the weights that cannot leave a tier; empty if there are none."""
        placing, in_use = self._placing, self._in_use()
        there = [chunk for chunk in placing.watched() if placing.homes.tier_of(chunk.place) == tier]
        kept = [chunk for chunk in there if chunk.chunk_id not in in_use]
        if not kept:
            return ""
        return (
            f"{sum(chunk.nbytes for chunk in kept)} bytes of weights ({kept[0].name!r} for one) cannot leave {tier} "
            "while tensors outside the model share their memory: drop other references to them, such as a kept "
            f"state_dict, or raise {tier}_memory."
        )


_HOW_MUCH = 'How much a step needs in all, print(run.stats()) says after one in budgets that hold it, such as "auto".'


def _as_options(needs: dict[str, int]) -> str:
    return ", ".join(f"{tier}_memory={nbytes} ({format_need(nbytes)})" for tier, nbytes in sorted(needs.items()))
