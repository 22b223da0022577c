# Two commands for a fresh clone: `make demo` and `make test`. Each makes .venv and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint gpu-test bench clean

demo: $(STAMP)
	OMP_NUM_THREADS=2 $(BIN)/gapped compare

test: lint
	$(BIN)/python -m pytest -n 2 -m "not slow and not gpu"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

gpu-test: $(STAMP)
	$(BIN)/python -m pytest -m gpu

bench: $(STAMP)
	OMP_NUM_THREADS=2 $(BIN)/python benchmarks/bench_cpu.py

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
