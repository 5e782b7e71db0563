# Every target makes its own virtual environment in .venv and installs again only when pyproject.toml changed. A real
# SGLang has one of its own, .venv-sglang (3 GB), with the versions that it needs, and so has verl, .venv-verl (2 GB).

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
MEGATRON_TESTS := tests/test_deep_ep.py tests/test_stateless_adam.py tests/test_megatron_*.py
NEWER_MEGATRON := 0.19.2
SGLANG := ROLLOUTBUS_SGLANG_PYTHON=$(CURDIR)/.venv-sglang/bin/python

.PHONY: demo demo-megatron demo-sglang test test-slow test-megatron test-megatron-newer test-sglang test-verl check docs bench clean

demo: .venv/installed-demo
	$(BIN)/rolloutbus run examples/demo/run.toml

# Two ranks on the CPU, with a GPT of megatron-core in each.
demo-megatron: .venv/installed-megatron
	OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 2 \
	-m examples.megatron.sort_digits

# Two real servers on the CPU and the real router in front of them.
demo-sglang: .venv/installed-sglang .venv-sglang/installed
	$(SGLANG) $(BIN)/python -m tests.sglang_servers 2 $(BIN)/python examples/sglang/rollouts.py

test: .venv/installed-dev
	$(BIN)/python -m pytest -m "not slow"

test-slow: .venv/installed-dev
	$(BIN)/python -m pytest -m slow

# With megatron-core and the binary of torch_memory_saver, on a CPU. For Python 3.11 pip takes megatron-core 0.16.1, so all
# of it runs once more with a newer one; for 3.12 it takes the newest.
test-megatron: .venv/installed-megatron
	$(BIN)/python -m pytest $(MEGATRON_TESTS)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 12))' || $(MAKE) test-megatron-newer

test-megatron-newer: .venv/installed-megatron .venv/megatron-core-$(NEWER_MEGATRON)
	PYTHONPATH=$(CURDIR)/.venv/megatron-core-$(NEWER_MEGATRON) $(BIN)/python -m pytest $(MEGATRON_TESTS)

# With a real SGLang server and a real router, on a CPU.
test-sglang: .venv/installed-dev .venv-sglang/installed
	$(SGLANG) $(BIN)/python -m pytest -m sglang -o faulthandler_timeout=900

# With verl, on a CPU. Its wheel holds a package `tests` of its own, so ours are run without their conftest.
test-verl: .venv-verl/installed
	OMP_NUM_THREADS=1 .venv-verl/bin/python -m pytest --noconftest tests/test_verl.py

check: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/installed-docs
	$(BIN)/python -m mkdocs build

bench: .venv/installed-dev
	$(BIN)/python -m benchmarks

clean:
	rm -rf .venv .venv-sglang .venv-verl .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist site

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("rolloutbus needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv

# Torch's CPU build is a tenth of the default one. It comes from a local folder where pip is configured with one
# (PIP_FIND_LINKS), else from torch's own index; where neither has it, the next step takes PyPI's default build.
# $(call torch-for-cpu,pip,requirement)
define torch-for-cpu
$(1) install --no-index --no-deps $(2) 2>/dev/null \
	|| $(1) install --retries 0 --timeout 10 --index-url https://download.pytorch.org/whl/cpu $(2) \
	|| echo "torch: no CPU build found, taking PyPI's default build (several GB)"
endef

.venv/torch: | .venv/bin/python
	$(BIN)/python -c 'import torch' 2>/dev/null \
	|| command -v nvidia-smi >/dev/null \
	|| $(call torch-for-cpu,$(PIP),torch)
	touch $@

.venv/installed-demo: pyproject.toml | .venv/torch
	$(PIP) install --editable '.[embedded]'
	touch $@

.venv/installed-dev: pyproject.toml | .venv/torch
	$(PIP) install --editable '.[embedded,math,dev]'
	touch $@ .venv/installed-demo .venv/installed-sglang

.venv/installed-docs: pyproject.toml .venv/installed-dev
	$(PIP) install --editable '.[docs]'
	touch $@

.venv/installed-megatron: pyproject.toml .venv/installed-dev
	$(PIP) install --editable '.[test-megatron]'
	touch $@

# The wheel says that it needs Python 3.12, and runs on 3.11 but for the one module that is compiled, a helper of data sets.
.venv/megatron-core-%: | .venv/bin/python
	$(PIP) install --no-deps --target $@ --ignore-requires-python --python-version 3.12 --only-binary :all: megatron-core==$*

.venv/installed-sglang: pyproject.toml | .venv/bin/python
	$(PIP) install --editable '.[sglang]'
	touch $@

# Made whole or not at all.
.venv-sglang/installed: SGLANG_PIP = .venv-sglang/bin/python -m pip --disable-pip-version-check --quiet
.venv-sglang/installed: tests/sglang_cpu/requirements.txt
	@echo "Installing SGLang for the CPU into .venv-sglang: 2 minutes, 3 GB"
	@rm -rf .venv-sglang
	@$(PYTHON) -m venv .venv-sglang
	@$(call torch-for-cpu,$(SGLANG_PIP),torch==2.13.0)
	@$(SGLANG_PIP) install --no-deps sglang==0.5.23 && $(SGLANG_PIP) install -r $< \
	|| { echo "SGLang cannot be installed here. It needs Linux on x86-64, a package index that pip reaches, and 3 GB of \
	disk. Or name the interpreter of an environment that has it: ROLLOUTBUS_SGLANG_PYTHON=... python -m pytest -m sglang"; exit 1; }
	@touch $@

# verl itself asks for all that it can work with. This is what its FSDP engine needs.
.venv-verl/installed: VERL_PIP = .venv-verl/bin/python -m pip --disable-pip-version-check --quiet
.venv-verl/installed: pyproject.toml
	@echo "Installing verl for the CPU into .venv-verl: 5 minutes, 2 GB"
	@rm -rf .venv-verl
	@$(PYTHON) -m venv .venv-verl
	@$(call torch-for-cpu,$(VERL_PIP),torch)
	@$(VERL_PIP) install --editable . verl==0.9.1 fastapi pillow uvicorn pytest pytest-asyncio
	@touch $@
