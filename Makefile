# Two commands for a fresh clone: `make demo` and `make test`. Each makes .venv and installs what it needs: the
# demo the library and the laboratory, all others what developers need as well.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LAB := $(VENV)/.lab
DEV := $(VENV)/.dev

.PHONY: demo test lint docs gpu-test bench numbers release-check dist floors floors-lowest floors-newest clean

demo: $(LAB)
	@echo "gapped compare: a small VAE on 8x8 digits, six estimators, three seeds each, trained together."
	$(BIN)/gapped compare
	@echo "Open runs/compare/report.html; $(BIN)/gapped --help has more."

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m "not slow and not gpu"

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(DEV)
	$(BIN)/python -m sphinx --fail-on-warning --quiet -b html docs docs/_build
	@echo "docs/_build/index.html"

gpu-test: $(DEV)
	$(BIN)/python -m pytest -m gpu

bench: $(LAB)
	$(BIN)/gapped bench

# The tables and figures of README.md and docs/, from the records under results/.
numbers: $(DEV)
	$(BIN)/python docs/generate/update.py

# The wheel, in an environment of its own, from another folder.
release-check: $(DEV)
	$(BIN)/python -m pytest -m slow tests/test_release.py

# What a release uploads, checked as an index would.
dist: $(DEV)
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl

# The tests against the lowest versions that pyproject.toml allows, and against current ones on a newer Python,
# each in an environment of its own. An old release may call what a newer one of another library deprecates, and
# an old matplotlib draws the committed figures a little otherwise; torch warns when it compiles on Python 3.13.0.
LOWEST ?= python3.11
NEWEST ?= python3.13
FLOORS ?= .venv-floors
PIP := -m pip install --quiet --disable-pip-version-check

floors: floors-lowest floors-newest

floors-lowest:
	$(LOWEST) -m venv $(FLOORS)/lowest || { echo "needs Python 3.11: make $@ LOWEST=/path/to/python3.11"; exit 1; }
	$(FLOORS)/lowest/bin/python tools/floors.py > $(FLOORS)/lowest.txt
	$(FLOORS)/lowest/bin/python $(PIP) -r $(FLOORS)/lowest.txt pandas pytest pytest-timeout pytest-xdist -e . -e "lab[ray]"
	OMP_NUM_THREADS=1 $(FLOORS)/lowest/bin/python -m pytest -n auto -m "not slow and not gpu" -W ignore::DeprecationWarning \
		-k "not committed_pictures and not figures_are_what_the_command_draws"

floors-newest:
	$(NEWEST) -m venv $(FLOORS)/newest || { echo "needs Python 3.13: make $@ NEWEST=/path/to/python3.13"; exit 1; }
	$(FLOORS)/newest/bin/python $(PIP) --upgrade --upgrade-strategy eager -e ".[dev]" -e "lab[dev]"
	OMP_NUM_THREADS=1 $(FLOORS)/newest/bin/python -m pytest -n auto -m "not slow and not gpu" -W "ignore:Guards may run slower:RuntimeWarning"

$(LAB): EXTRAS = -e . -e lab
$(DEV): EXTRAS = -e ".[dev]" -e "lab[dev]"
$(LAB) $(DEV): pyproject.toml lab/pyproject.toml constraints.txt
	@echo "Installing torch and what else this needs into $(VENV), which takes minutes the first time."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) -c constraints.txt $(EXTRAS)
	touch $(LAB) $@

clean:
	rm -rf $(VENV) $(FLOORS) .mypy_cache .ruff_cache .pytest_cache docs/_build dist
