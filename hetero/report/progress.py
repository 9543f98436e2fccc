"""What a long phase tells while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a long phase is. Sizes are bytes; in "prefill" they are those of the weights passed."""

    phase: Literal["load", "prefill", "decode"]
    done_nbytes: int
    total_nbytes: int
    message: str = ""


ProgressCallback = Callable[[Progress], None]
