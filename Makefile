# make run     set up .venv where there is none, then generate text with the default model
# make test    the test suite, two files at a time, but for what the next two run
# make test-slow    real runs of many presets, most architectures, benchmarks, replicas, and the sanitizers
# make wheel   a wheel in dist/, with which other machines with this Python, and no older C library, need no compiler
# make test-wheel   a wheel by the Dockerfile's steps, run in an environment and a folder of its own (part of test-slow)
# make test-nodes   Ray of several nodes (Linux namespaces; else on loopback), jobs, two files at a time
# make fuzz-api    10,000 generated requests and 10,000 broken ones against the HTTP edge
# make chaos   kill and stop each process of a server under load, then change what is around it: docs/results/reliability.md, surroundings.md
# make soak    an hour of mixed load on a server, then idle: memory, descriptors, slots, KV blocks: docs/results/soak.md
# make readme-times README's commands, one after the other, from an empty cache, with their times
# make papers  the papers' tables, simulated: docs/results/paper-*.md, with JOBS processes
# make train-default-model    train the model that ships with the project, 13.4 M tokens: three to four hours of one core (docs/default-model.md)
# make gpu     every check and measurement that needs a GPU, with PYTHON as it is: installs nothing (docs/gpu-measurements.md)
# make lint    ruff, mypy, and whether constraints.txt installs from PyPI alone
# make stub    write the stubs of the compiled modules again after a change of a binding (*_module.cpp, module.cpp)
# make clean   remove .venv and everything that was generated
#
# Variables: PYTHON (3.11 to 3.13), VENV, PROMPT, ARGS (more options for `tiermoe run`), TRAIN_ARGS, PIP_ARGS (for `pip install`),
# TORCH_INDEX (where torch comes from beside PyPI; .venv keeps it), JOBS (test files at a time), MINUTES (of `make soak`), FUZZ_PARTS (of ten, 1,000 requests each: `make fuzz-api`).

PYTHON ?= python3
VENV ?= .venv
ifndef PROMPT
define PROMPT
def read_config(path):
    """
endef
endif
ARGS ?= --temperature 0.7 --top-p 0.9 --seed 1
PIP_ARGS ?=
JOBS ?= 2
MINUTES ?= 60
FUZZ_PARTS ?= 0 1 2 3 4 5 6 7 8 9

BIN := $(VENV)/bin
TORCH_INDEX ?= $(shell cat $(VENV)/.torch-index 2>/dev/null)
CPU_INDEX := https://download.pytorch.org/whl/cpu
GPU_FILES ?= $(wildcard /dev/nvidia* /dev/nvhost-gpu)
# What pip fetches, measured with constraints.txt on x86-64, and what an installation then takes.
CUDA_SIZE := 2.9 GB (5.3 GB on disk)
CPU_SIZE := 0.4 GB (1.6 GB on disk)
# torch 2.13.0+cpu is newer than 2.13.0 to pip, so it is taken where an index has both.
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) \
  $(addprefix --extra-index-url ,$(TORCH_INDEX)) -c constraints.txt
# What type checkers may follow: the package's own files, under the package's name, whatever the clone is called.
PACKAGE := __init__.py errors.py limits.py actors benchmarks cluster kernels proto
# What an installation depends on: the requirements, and the C++ sources that it compiles.
SOURCES := pyproject.toml constraints.txt setup.py $(wildcard $(foreach folder,actors/core kernels/cpu kernels/triton proto,$(folder)/*.cpp $(folder)/*.hpp))

.PHONY: run test test-slow wheel test-wheel test-nodes fuzz-api chaos soak readme-times papers gpu lint stub clean train-default-model
export PROMPT

ifneq ($(wildcard $(VENV)/.torch-index),)
ifneq ($(strip $(TORCH_INDEX)),$(shell cat $(VENV)/.torch-index))
ifneq ($(MAKECMDGOALS),clean)
$(error $(VENV) has torch of '$(shell cat $(VENV)/.torch-index)', not of '$(TORCH_INDEX)'; run `make clean`, or give another VENV)
endif
endif
endif

ifneq ($(words $(VENV)),1)
$(error VENV is '$(VENV)'; give a path without spaces, such as one below this folder)
endif

define INSTALLING
@{ if [ -e $(VENV)/.torch-index ]; then echo "installing into $(VENV) what is missing there or has changed"; exit; fi; \
echo "installing into $(VENV), some minutes the first time; to fetch:"; \
if [ -n "$(TORCH_INDEX)" ]; then \
  echo "  $(CPU_SIZE) if $(TORCH_INDEX) has torch for CPUs, $(CUDA_SIZE) if for GPUs"; \
else \
  echo "  $(CUDA_SIZE) with PyPI's torch, which is for NVIDIA GPUs; less if pip is set up to take one for CPUs"; \
  [ -n "$(GPU_FILES)" ] || \
    echo "  $(CPU_SIZE) with TORCH_INDEX=$(CPU_INDEX): no NVIDIA GPU is seen here"; \
fi; } >&2
endef

# pip shows nothing of what it compiles: this compiles before it, and pip's own build takes the objects (setup.py).
# Without a compiler it ends before anything large is fetched.
define COMPILE
$(PIP_INSTALL) --quiet nanobind pip setuptools
$(BIN)/python setup.py --quiet build_ext --inplace
endef

run: $(VENV)/.installed
	@$(BIN)/tiermoe run "$$PROMPT" --emulate $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup

test-slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -m slow

wheel: $(VENV)/.installed-dev
	rm -rf build/lib* build/bdist* build/wheel
	$(BIN)/python -m pip wheel --disable-pip-version-check --no-deps --wheel-dir build/wheel .
	PATH="$$(cd $(BIN) && pwd):$$PATH" $(BIN)/python -m auditwheel repair --wheel-dir dist build/wheel/*.whl

test-wheel: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m slow tests/install

test-nodes: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -rs -n $(JOBS) --dist loadgroup -m nodes

fuzz-api: $(VENV)/.installed-dev
	for part in $(FUZZ_PARTS); do \
	  $(BIN)/python -m pytest --fuzz-cases 1000 --fuzz-part $$part tests/e2e/test_fuzz.py || exit 1; done

chaos: $(VENV)/.installed-dev
	$(BIN)/python tests/chaos/run.py --out docs/results

soak: $(VENV)/.installed-dev
	$(BIN)/python tests/chaos/soak.py --out docs/results --minutes $(MINUTES)

readme-times: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q -s --cold tests/e2e/test_readme.py -m "slow or not slow" -k "command or start"

train-default-model: $(VENV)/.installed
	$(BIN)/python models/train.py $(TRAIN_ARGS)

papers: $(VENV)/.installed
	$(BIN)/tiermoe bench papers --jobs $(JOBS) --out docs/results

gpu:
	PYTHON=$(PYTHON) benchmarks/gpu/run.sh --out docs/results

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	@mkdir -p build/typecheck/tiermoe
	@ln -sfn $(addprefix ../../../,$(PACKAGE)) build/typecheck/tiermoe/
	MYPYPATH=build/typecheck $(BIN)/mypy -p tiermoe
	$(BIN)/python tests/install/constraints.py

stub: $(VENV)/.installed-dev
	$(BIN)/python -m nanobind.stubgen -q -m tiermoe.actors.core._core -o actors/core/_core.pyi
	$(BIN)/python -m nanobind.stubgen -q -m tiermoe.kernels._cpu -o kernels/_cpu.pyi
	$(BIN)/python -m nanobind.stubgen -q -m tiermoe.kernels._launch -o kernels/_launch.pyi

clean:
	rm -rf $(VENV) build dist out *.egg-info actors/core/*.so kernels/*.so proto/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps are renewed when a requirement or a C++ source changes; a second `make run` installs nothing.
$(VENV)/.installed: $(SOURCES) | $(BIN)/python
	$(INSTALLING)
	$(COMPILE)
	$(PIP_INSTALL) -e .
	@echo "$(strip $(TORCH_INDEX))" > $(VENV)/.torch-index
	@touch $@

$(VENV)/.installed-dev: $(SOURCES) | $(BIN)/python
	$(INSTALLING)
	$(COMPILE)
	$(PIP_INSTALL) -e '.[dev]'
	@echo "$(strip $(TORCH_INDEX))" > $(VENV)/.torch-index
	@touch $(VENV)/.installed $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
