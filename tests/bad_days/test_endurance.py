"""Ten thousand swaps through a real model: the same answer, the same descriptors, the same memory."""

from __future__ import annotations

import gc
from pathlib import Path

import psutil
import pytest
import torch

from tests.bad_days.rig import DEVICES, load, logits_of

pytestmark = pytest.mark.usefixtures("no_leaks", "no_memory_left")

NUM_SWAPS = 10_000
GROWTH_NBYTES = 3 << 20


@pytest.mark.parametrize("device", DEVICES)
def test_ten_thousand_swaps_keep_descriptors_threads_and_memory(
    checkpoint: Path, reference: torch.Tensor, device: str
) -> None:
    process = psutil.Process()
    with load(checkpoint, device) as run:

        def num_swaps() -> int:
            # Every read and every copy fills a slot of a ring, for a chunk that had none.
            return int(run.executor.stats.num_reads + run.executor.stats.num_copies)

        for _ in range(40):
            logits_of(run.model)
        gc.collect()
        before = process.num_fds(), process.num_threads(), run.ledger.used("cpu")
        rss_nbytes, first = process.memory_info().rss, num_swaps()
        while num_swaps() - first < NUM_SWAPS:
            logits = logits_of(run.model)
        gc.collect()
        assert torch.equal(logits, reference)
        assert (process.num_fds(), process.num_threads(), run.ledger.used("cpu")) == before
        assert process.memory_info().rss - rss_nbytes < GROWTH_NBYTES
