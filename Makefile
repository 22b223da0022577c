# Two commands for a fresh clone: `make demo` and `make test`. Each makes .venv and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint docs gpu-test bench release-check clean

demo: $(STAMP)
	$(BIN)/gapped compare

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -m "not slow and not gpu"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(STAMP)
	$(BIN)/python -m sphinx --fail-on-warning --quiet -b html docs docs/_build
	@echo "docs/_build/index.html"

gpu-test: $(STAMP)
	$(BIN)/python -m pytest -m gpu

bench: $(STAMP)
	$(BIN)/gapped bench

# The wheel, in an environment of its own, from another folder.
release-check: $(STAMP)
	$(BIN)/python -m pytest -m slow tests/test_release.py

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache docs/_build
