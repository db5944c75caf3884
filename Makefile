# make demo        install, and run the demonstration
# make test        install, lint, check types and layers, and run all tests
# make test-fast   the same without the tests that are slow, need a browser or start a deployment
# make docs        build the documentation into site/; a warning, or a table that is out of date, is an error
# make results     fill the tables and plots of the documentation from the recorded results
# make format      format the code, and write the catalogue that `equipoise list` reads (make catalogue)
# make notebooks   execute the notebooks in examples/ and store their outputs
# make setup       only install into .venv
PYTHON ?= python3
BIN := .venv/bin
# One process more than two cores can feed: tests of deployments mostly wait. With worksteal none is idle at the end.
PYTEST := $(BIN)/pytest -n 3 --dist worksteal
# What one process has compiled, all others read: the three of the tests, and hundreds that these start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-fast lint docs results format catalogue notebooks clean

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "equipoise needs Python 3.11 or later; say which with make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "setuptools>=77" torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt -e ".[dev]"
	touch $@

demo: setup
	$(BIN)/equipoise demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(PYTEST)

test-fast: lint
	$(PYTEST) -m "not slow and not browser and not deployment"

docs: setup
	$(BIN)/python -m equipoise.reproduction.documents --check
	$(BIN)/mkdocs build --strict

results: setup
	$(BIN)/python -m equipoise.reproduction.documents

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python -m equipoise.runs.listing

catalogue: setup
	$(BIN)/python -m equipoise.runs.listing

notebooks: setup
	$(BIN)/python scripts/notebooks.py

clean:
	rm -rf .venv build site *.egg-info
