# Needs Python 3.11 or newer and nothing else; everything is installed into .venv.
#   make demo PYTHON=python3.12
#   make demo PIP_ARGS="--extra-index-url <index of CPU builds>"

PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?=
E2E_ARGS ?=
STACK_ARGS ?=
SCREENS_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt $(PIP_ARGS)

# idle OpenMP threads that spin take the cores from the worker's other threads
export OMP_WAIT_POLICY ?= PASSIVE

.DEFAULT_GOAL := help
.PHONY: help venv install demo test test-slow test-gpu chaos e2e stack screens check format bench-cpu clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Pagemill needs Python 3.11 or newer; name one: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# two stamps: the demo needs neither test servers nor linters
$(VENV)/.run: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV): a few minutes, once" >&2
	$(PIP) --editable '.[worker,demo]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV): a few minutes, once" >&2
	$(PIP) --editable '.[worker,structured,celery,bulk,gateway,otel,demo,test,dev]'
	@touch $@ $(VENV)/.run

# servers of other versions, for tests; those that cannot be had here are left out
$(VENV)/.servers: tests/support/server_box.py $(VENV)/.dev
	@$(BIN)/python -m tests.support.server_box $(PIP_ARGS)
	@touch $@

# a browser of 300 MB, and what drives it
$(VENV)/.screens: tests/support/chromium.py $(VENV)/.dev
	$(PIP) --editable '.[screens]'
	$(BIN)/python -m tests.support.chromium
	@touch $@

venv: $(VENV)/.run  ## create .venv with what a worker and the demo need

install: $(VENV)/.dev  ## create .venv with the tools for tests and checks too

demo: $(VENV)/.run  ## summarise 24 documents with a real model, from nothing
	@$(BIN)/python -m producers.demo $(DEMO_ARGS)

test: $(VENV)/.dev $(VENV)/.servers  ## run all tests but the slow ones
	$(BIN)/python -m pytest -n 3 --dist worksteal $(PYTEST_ARGS)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/kernels/interpreted -n 2 --dist worksteal $(PYTEST_ARGS)
	$(BIN)/python -m pytest tests/kernels/compiled -n 2 --dist worksteal $(PYTEST_ARGS)

test-gpu:  ## run the tests that need a GPU, with the python that has its torch (PYTHON=...)
	$(PYTHON) -m pytest tests/gpu --confcutdir=tests/gpu -p no:benchmark $(PYTEST_ARGS)

test-slow: $(VENV)/.dev $(VENV)/.servers  ## run the slow tests: real model, chaos at full size
	$(BIN)/python -m pytest -m slow --timeout 900 $(PYTEST_ARGS)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/kernels/interpreted -m slow --timeout 900 $(PYTEST_ARGS)

chaos: $(VENV)/.dev  ## kill, pause and poison 4 workers over 20,000 jobs, and count the results (CHAOS_ARGS=...)
	$(BIN)/python -m tests.chaos.driver $(CHAOS_ARGS)

e2e: $(VENV)/.dev  ## OpenAI's client, a foreign Celery app and bulk jobs against real servers (E2E_ARGS=...)
	@$(BIN)/python -m tests.e2e $(E2E_ARGS)

stack: $(VENV)/.dev $(VENV)/.servers  ## the services of docker-compose.yml without containers: started, used, stopped
	@$(BIN)/python -m tests.stack $(STACK_ARGS)

screens: $(VENV)/.screens  ## pictures of the status page into screens/, checked by axe-core (SCREENS_ARGS=...)
	@$(BIN)/python -m tests.screens $(SCREENS_ARGS)

check: $(VENV)/.dev  ## check format, lint, types and import layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(VENV)/.dev  ## put the code into the format that `check` wants
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench-cpu: $(VENV)/.dev  ## measure throughput, KV use and the cost of the queue, as JSON lines
	@$(BIN)/python -m benchmarks.cpu $(BENCH_ARGS)

clean:  ## remove .venv and the tools' caches; pulled models stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis demo-results.jsonl
