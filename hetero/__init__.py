"""hetero runs and trains PyTorch models that do not fit: weights stream across GPU, CPU and disk, exactly."""

from __future__ import annotations

import importlib
import logging
from typing import Any

__version__ = "0.1.0"

logging.getLogger(__name__).addHandler(logging.NullHandler())

# Public name -> module that defines it. Imported at first use, because torch alone takes more than a second.
_EXPORTS = {
    "load": "hetero.loading",
    "plan": "hetero.loading",
    "wrap": "hetero.wrapping",
    "WrappedRun": "hetero.wrapped",
    "Run": "hetero.run",
    "HeteroError": "hetero.io.errors",
    "ConfigError": "hetero.io.errors",
    "TooSmallError": "hetero.planning",
    "UnsupportedError": "hetero.io.errors",
    "CheckpointError": "hetero.io.errors",
    "OutOfMemoryError": "hetero.io.errors",
    "IOEngineError": "hetero.io.errors",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
