"""A process of its own for what one process cannot show: death, exit, forks. Called with MODE FOLDER.

Prints `ready` on its own line when it is where the test wants it.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import torch
from torch import nn

from tests.bad_days.wrap_rig import Net, step, wrap

mode, folder = sys.argv[1], Path(sys.argv[2])


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def train(model: nn.Module, num_steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for seed in range(num_steps):
        step(model, seed)
        optimizer.step()


def digest(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


if __name__ == "__main__":
    torch.set_num_threads(1)
    model = Net()
    run = wrap(model, folder, "emulated" if mode.endswith("emulated") else "cpu")
    train(model, 2)
    assert run.plan.num_streamed > 0
    say("ready")
    if mode.startswith("killed"):
        while True:
            train(model, 1)
    elif mode.startswith("answer"):
        train(model, 20)
        run.close()
        say(digest(model))
    elif mode.startswith("in a forward"):
        model.layers[3].register_forward_hook(lambda *_: sys.exit(0))
        step(model)
    else:
        assert mode.startswith("fork")
        pid = os.fork()
        if pid == 0:
            sys.exit(0)  # ends as Python does, with everything that is registered for the exit
        assert os.waitpid(pid, 0)[1] == 0
        train(model, 2)
