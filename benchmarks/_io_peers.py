"""Peers of the I/O benchmarks, each in a process of its own, also of another interpreter (`--peers-python`)."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from _rounds import UnavailableError

WORKER = Path(__file__).resolve().with_name("_io_peers_worker.py")
AIO_SETTINGS = ((1 << 20, 8, 1), (1 << 20, 32, 1), (1 << 20, 32, 2), (4 << 20, 4, 1), (16 << 20, 4, 1), (4 << 20, 8, 4))
"""Settings of DeepSpeed's aio worth trying: (block_nbytes, queue_depth, num_threads)."""

Answer = dict[str, Any]


class Peer:
    """A child process that answers requests. `ask` blocks until the answer; leaving the context ends the child."""

    def __init__(self, python: str | os.PathLike[str], *, log: Path | None = None) -> None:
        self._log: IO[bytes] | int = log.open("wb") if log else subprocess.DEVNULL
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2"}
        self._process = subprocess.Popen(
            [os.fspath(python), "-P", os.fspath(WORKER)],  # -P: a library's `import io` must not find ours
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )

    def ask(self, what: str, **arguments: Any) -> Answer:
        """Return the answer. Raises UnavailableError where the peer is missing, does not work here, or died."""
        assert self._process.stdin is not None and self._process.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"what": what, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line:
            raise UnavailableError(f"its process ended with status {self._process.wait()}")
        answer: Answer = json.loads(line)
        if "unavailable" in answer:
            raise UnavailableError(answer["unavailable"])
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        if exc is not None:
            self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        if not isinstance(self._log, int):
            self._log.close()
