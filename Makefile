# Each target does its own set-up. A Python of 3.11 or 3.12 is found on PATH; name another with PYTHON=...
# EXTRAS=... are the packages' extras: vLLM is `cpu` or `cuda`.
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))
PYTHON ?= $(shell for python in python3 python3.12 python3.11; do \
	$$python -c '$(SUPPORTED)' 2>/dev/null && echo $$python && break; done)
EXTRAS ?= bench,cpu,demo,docs,lora,math,s3,tensorboard,dev
VENV := .venv
BIN := $(VENV)/bin

.PHONY: venv demo test lint format docs down

venv: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or 3.12 on PATH; install one or give PYTHON=..."; exit 2; }
	@echo "installing into $(VENV) (a few minutes the first time)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]' || { \
		echo "error: pip found no such set; vLLM's extra cpu wants torch 2.13.0+cpu, see docs/vllm.md"; exit 2; }
	@# vLLM asks for torchvision and the like, which may come for CUDA beside a CPU's torch: then transformers' models
	@# can't be imported. Neither Sluice nor vLLM's text models need them.
	@broken=$$($(BIN)/python -m flows.cli.installation) && \
		{ test -z "$$broken" || $(BIN)/pip uninstall --quiet --yes $$broken; }
	@touch $@

demo: venv  ## data, tiny model, warm start, GRPO; STEPS=n for another number of steps
	@$(BIN)/sluice demo $(if $(STEPS),--steps $(STEPS))

format: venv  ## format the code and fix what can be fixed
	$(BIN)/ruff check --fix --quiet .
	$(BIN)/ruff format --quiet .

lint: venv  ## format, lint, types, import layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint  ## lint, types, layers and the whole suite, two files at a time
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

docs: venv  ## the documentation as a site, in site/; a broken link is an error
	$(BIN)/mkdocs build --strict --quiet

down:  ## stop the local Prefect server and Ray
	@test ! -x $(BIN)/sluice || $(BIN)/sluice down
