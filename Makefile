# Every target makes its own virtual environment in .venv and installs again only when pyproject.toml changed.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: demo test test-slow test-megatron check bench clean

demo: .venv/installed-demo
	$(BIN)/rolloutbus run examples/demo/run.toml

test: .venv/installed-dev
	$(BIN)/python -m pytest -m "not slow"

test-slow: .venv/installed-dev
	$(BIN)/python -m pytest -m slow

# With megatron-core and the binary of torch_memory_saver, on a CPU.
test-megatron: .venv/installed-megatron
	$(BIN)/python -m pytest tests/test_deep_ep.py tests/test_stateless_adam.py tests/test_megatron_*.py

check: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/installed-dev
	$(BIN)/python -m benchmarks

clean:
	rm -rf .venv .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("rolloutbus needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv

# Without a GPU torch's CPU build does, at a tenth of the size. It comes from a local folder where pip is configured with
# one (PIP_FIND_LINKS), else from torch's own index; where neither has it, the next step takes PyPI's default build.
.venv/torch: | .venv/bin/python
	$(BIN)/python -c 'import torch' 2>/dev/null \
	|| command -v nvidia-smi >/dev/null \
	|| $(PIP) install --no-index --no-deps torch 2>/dev/null \
	|| $(PIP) install --retries 0 --timeout 10 --index-url https://download.pytorch.org/whl/cpu torch \
	|| echo "torch: no CPU build found, taking PyPI's default build (several GB)"
	touch $@

.venv/installed-demo: pyproject.toml | .venv/torch
	$(PIP) install --editable '.[embedded]'
	touch $@

.venv/installed-dev: pyproject.toml | .venv/torch
	$(PIP) install --editable '.[embedded,math,dev]'
	touch $@ .venv/installed-demo

.venv/installed-megatron: pyproject.toml .venv/installed-dev
	$(PIP) install --editable '.[test-megatron]'
	touch $@
