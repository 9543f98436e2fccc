"""Blocking reads and writes through the page cache: for file systems, containers and tests where O_DIRECT is no use."""

from __future__ import annotations

from hetero.io.backends.threads import ThreadsBackend


class BufferedBackend(ThreadsBackend):
    """The threads backend on files opened without O_DIRECT: no alignment rules, so nothing is ever bounced."""

    name = "buffered"
    direct = False
