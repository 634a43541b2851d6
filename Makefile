# Two commands: `make demo` sets up and runs the whole pipeline; `make test` sets up and passes the tests.
# A machine needs Python 3.11 or newer, pip and gcc.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The CPU build of torch where pip offers one at this version; set TORCH= to keep an installed or other build.
TORCH ?= torch==2.13.0

.PHONY: demo test lint setup-demo setup-test clean

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet -e ".[demo]"
	touch $@

$(VENV)/.test: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $@

setup-demo: $(VENV)/.demo

setup-test: $(VENV)/.test

demo: setup-demo
	$(BIN)/eagle3 +experiment=demo

lint: setup-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

test: lint
	$(BIN)/python -m pytest

clean:
	rm -rf $(VENV)
