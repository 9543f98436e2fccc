"""Installs as users have them: a wheel made from the sdist, with a compiler, without one, and when native is required.

Each install goes into a virtual environment of its own that sees this interpreter's packages through a .pth file, so
that nothing is downloaded; hetero itself must come from the wheel.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [pytest.mark.package, pytest.mark.timeout(600)]

_ROOT = Path(__file__).parents[2]
_FALSE_COMPILER = {"CXX": "/bin/false", "CC": "/bin/false"}
_FAST_TESTS = ("tests/io", "tests/report", "tests/cli", "tests/packaging/test_imports.py")


@dataclass(frozen=True, slots=True)
class Install:
    """A virtual environment with hetero installed from `wheel`."""

    python: Path
    wheel: Path

    def run(self, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        return run(self.python, *arguments, cwd=cwd)


def run(
    python: Path | str, *arguments: str, cwd: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python without this process's own build and import settings; return its texts, whatever its exit code."""
    inherited = {
        key: value for key, value in os.environ.items() if key not in ("HETERO_REQUIRE_NATIVE", "PYTHONPATH", "CI")
    }
    # cmake and ninja are looked up on PATH; those of this environment are the pinned ones.
    inherited["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{inherited['PATH']}"
    return subprocess.run(
        [str(python), *arguments],
        cwd=cwd,
        env={**inherited, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )


def build_wheel(
    source: Path, folder: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return run(
        sys.executable,
        *("-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(folder), str(source)),
        cwd=folder,
        environment=environment,
    )


def install(wheel: Path, folder: Path) -> Install:
    """Make a virtual environment under `folder` and unpack the wheel into it, as pip would."""
    venv.create(folder, symlinks=True, with_pip=False)
    python = folder / "bin" / "python"
    scheme = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("platlib", "venv", vars=scheme))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # Appended after the wheel's own folder; plain paths only, so the checkout's import hook (a .pth line) stays out.
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('platlib')}\n", encoding="utf-8")
    return Install(python, wheel)


@pytest.fixture(scope="module")
def sdist_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked sdist of this checkout."""
    folder = tmp_path_factory.mktemp("sdist")
    program = f"import scikit_build_core.build as b; print(b.build_sdist({str(folder)!r}))"
    done = run(sys.executable, "-c", program, cwd=_ROOT)
    assert done.returncode == 0, done.stderr
    archive = folder / done.stdout.splitlines()[-1]
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def native_install(sdist_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Install:
    return _install_from(sdist_source, tmp_path_factory.mktemp("native"), {"HETERO_REQUIRE_NATIVE": "1"})


@pytest.fixture(scope="module")
def pure_install(sdist_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Install:
    return _install_from(sdist_source, tmp_path_factory.mktemp("pure"), _FALSE_COMPILER)


def _install_from(source: Path, folder: Path, environment: Mapping[str, str]) -> Install:
    # A copy, because the build leaves its cache of the compiler beside the source.
    copy = shutil.copytree(source, folder / "source")
    done = build_wheel(copy, folder, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("hetero-*.whl")
    return install(wheel, folder / "venv")


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder with a copy of the tests and none of the code."""
    shutil.copytree(_ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(_ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_sdist_holds_each_file_once(sdist_source: Path) -> None:
    names = {str(path.relative_to(sdist_source)) for path in sdist_source.rglob("*")}
    assert {"io/csrc/uring.cpp", "memory/plan.py", "cpu_kernels/__init__.py", "LICENSE", "CMakeLists.txt"} <= names
    assert not {"hetero/memory", "hetero/io", "hetero/cpu_kernels"} & names


def test_wheel_holds_the_packages_and_no_sources(native_install: Install) -> None:
    names = set(zipfile.ZipFile(native_install.wheel).namelist())
    assert {"hetero/__init__.py", "hetero/py.typed", "hetero/memory/plan.py", "hetero/io/errors.py"} <= names
    assert any(name.startswith("hetero/io/_uring.") and name.endswith(".so") for name in names)
    assert not [name for name in names if name.endswith((".cpp", ".hpp", "README.md")) or "csrc" in name]
    assert {name.split("/")[0] for name in names} == {
        "hetero",
        native_install.wheel.name.split("-cp")[0] + ".dist-info",
    }


@pytest.mark.parametrize("kind", ["native", "pure"])
def test_an_install_passes_the_tests_outside_the_checkout(
    kind: str, request: pytest.FixtureRequest, outside: Path
) -> None:
    installed: Install = request.getfixturevalue(f"{kind}_install")
    where = installed.run("-c", "import hetero.io.errors as e; print(e.__file__)", cwd=outside)
    assert Path(where.stdout.strip()).is_relative_to(installed.python.parents[1]), where.stderr

    done = installed.run("-m", "pytest", "-q", "-x", *_FAST_TESTS, cwd=outside)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout.splitlines()[-1]


def test_without_a_compiler_one_line_says_what_runs_instead(pure_install: Install, tmp_path: Path) -> None:
    assert pure_install.wheel.name.endswith("-py3-none-any.whl")
    missing = tmp_path / "missing.gguf"

    done = pure_install.run("-m", "hetero", "generate", str(missing), "-p", "Hi", cwd=tmp_path)

    said = " ".join(done.stderr.split())
    assert said.count("on the reference path") == 1
    assert "disk I/O by io_uring (instead: threads with preadv and pwritev)" in said


def test_with_a_compiler_no_line_about_the_reference_path(native_install: Install, tmp_path: Path) -> None:
    missing = tmp_path / "missing.gguf"
    done = native_install.run("-m", "hetero", "generate", str(missing), "-p", "Hi", cwd=tmp_path)
    assert done.returncode != 0
    assert "on the reference path" not in " ".join(done.stderr.split())


def test_a_broken_compiler_fails_loudly_when_native_is_required(sdist_source: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(sdist_source, tmp_path / "source")
    done = build_wheel(copy, tmp_path, _FALSE_COMPILER | {"HETERO_REQUIRE_NATIVE": "1"})
    assert done.returncode != 0
    assert "CMake configuration failed" in done.stdout + done.stderr
    assert not list(tmp_path.glob("*.whl"))
