# Everything runs inside .venv; `make demo` and `make test` work on a machine with only git and Python 3.11.
PYTHON ?= python3.11
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1
export GLOO_SOCKET_IFNAME ?= lo

.PHONY: demo test check bench clean setup

# torch first and pinned: a later, unpinned install would pull gigabytes of CUDA packages.
.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q torch==2.13.0
	$(BIN)/pip install -q -e ".[test]"
	touch .venv/ready

setup: .venv/ready

demo: .venv/ready
	$(BIN)/scout demo

test: .venv/ready
	$(BIN)/python -m pytest tests
	$(BIN)/python -m pytest integration_tests

check: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/ready
	$(BIN)/python -m benchmarks

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build scout_runs
