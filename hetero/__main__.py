"""Let `python -m hetero` be the `hetero` command."""

from __future__ import annotations

from hetero.cli import main

if __name__ == "__main__":
    main()
