# Everything runs inside .venv; `make demo` and `make test` work on a machine with only git and Python 3.11.
PYTHON ?= python3.11
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1
export GLOO_SOCKET_IFNAME ?= lo
MEGATRON_NEXT := 0.18.2

.PHONY: demo megatron-next test test-megatron test-unit check bench clean setup

# torch first and pinned: a later, unpinned install would pull gigabytes of CUDA packages.
.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q torch==2.13.0
	$(BIN)/pip install -q -e ".[test]"
	touch .venv/ready

# The frameworks that the integration tests run through, in the versions they are checked with.
.venv/frameworks: .venv/ready
	$(BIN)/pip install -q torchtitan==0.2.2 megatron-core==0.16.1 deepspeed==0.19.8 ninja
	touch .venv/frameworks

# A newer Megatron than pip installs on Python 3.11; its wheel runs there all the same, unpacked.
megatron-next: .cache/megatron/megatron-core-$(MEGATRON_NEXT)

.cache/megatron/megatron-core-$(MEGATRON_NEXT): | .venv/ready
	rm -rf $@.wheel $@
	$(BIN)/pip download -q --no-deps --only-binary=:all: --python-version 3.12 \
	  megatron-core==$(MEGATRON_NEXT) -d $@.wheel
	$(BIN)/python -m zipfile -e $@.wheel/*.whl $@
	rm -r $@.wheel

setup: .venv/ready

demo: .venv/ready
	$(BIN)/scout demo

test: test-unit .venv/frameworks megatron-next
	for adapter in adapters/*/tests; do $(BIN)/python -m pytest $$adapter || exit 1; done
	$(BIN)/python -m pytest integration_tests

test-megatron: .venv/frameworks megatron-next
	$(BIN)/python -m pytest adapters/megatron/tests
	$(BIN)/python -m pytest integration_tests/test_megatron.py

test-unit: .venv/ready
	$(BIN)/python -m pytest tests

check: .venv/frameworks
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/ready
	$(BIN)/python -m benchmarks

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build scout_runs
