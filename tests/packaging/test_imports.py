"""What importing a part brings along: help must come at once, and the planner needs integers only."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

_HEAVY = ("torch", "transformers", "numpy")


def loaded_after(code: str) -> set[str]:
    """Run `code` in a fresh interpreter and return which of the heavy packages it imported."""
    program = f"import sys\n{code}\nprint(*(name for name in {_HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("import hetero; hetero.ConfigError; dir(hetero)", id="hetero and its errors"),
        pytest.param("import hetero.memory.plan", id="the planner"),
        pytest.param("import hetero.memory.simulate", id="the simulation"),
        pytest.param("import hetero.report.timeline", id="the timeline"),
        pytest.param("import hetero.cli.app, hetero.cli.render, hetero.cli.progress, hetero.cli.doctor", id="the cli"),
    ],
)
def test_importing_brings_nothing_heavy(code: str) -> None:
    assert loaded_after(code) == set()


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param([], id="bare"),
        pytest.param(["--help"], id="help"),
        pytest.param(["--version"], id="version"),
        pytest.param(["generate", "--help"], id="generate help"),
        pytest.param(["generate", "m"], id="usage error"),
    ],
)
def test_help_and_usage_errors_need_nothing_heavy(arguments: list[str]) -> None:
    code = f"""
from hetero.cli import main
sys.argv = ["hetero", *{arguments!r}]
try:
    main()
except SystemExit:
    pass
"""
    assert loaded_after(code) == set()


def test_the_probe_of_this_file_sees_an_import() -> None:
    assert "numpy" in loaded_after("import numpy")


def test_unknown_names_of_the_package_are_attribute_errors() -> None:
    import hetero

    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        _ = hetero.lode


def test_no_module_is_named_like_a_public_name() -> None:
    # Importing hetero/load.py would put the module in the place of the function hetero.load.
    import hetero

    assert [name for name in hetero.__all__ if find_spec(f"hetero.{name}")] == []


def test_every_public_name_is_there() -> None:
    import hetero

    assert set(hetero.__all__) <= set(dir(hetero))
    for name in hetero.__all__:
        assert getattr(hetero, name) is not None
