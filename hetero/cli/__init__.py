"""The `hetero` command: arguments in, text on stdout, everything else on stderr."""

from __future__ import annotations

from hetero.cli.app import main as main
