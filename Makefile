# What a developer types. `make` alone says it all.

VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PYTHON ?= python3

# Scripts find python3 and wald where setup put them.
RUN    := PATH="$(abspath $(BIN)):$$PATH"

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup check fix test test-fast demo bench torture lock clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## .venv with the locked packages and wald itself, editable

$(READY): requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "wald needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

check: $(READY) ## format, lint, types, who imports whom
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -q tests/test_layers.py tests/test_tidy.py

fix: $(READY) ## mend what a tool can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: $(READY) ## every test, one process a core
	$(BIN)/pytest -n auto --maxprocesses 8 --dist loadfile

test-fast: $(READY) ## the tests that take no more than a few seconds
	$(BIN)/pytest -q -m 'not slow'

demo: $(READY) ## the main job on real text, in under a minute; INPUT=file to use your own
	$(RUN) scripts/demo

bench: $(READY) ## speed beside cat, dd, svlogd, s6-log, zstd and tar, in one run
	$(RUN) scripts/bench $(BENCH)

torture: $(READY) ## kill -9, again and again, under load; TORTURE='--kills 500' for a long night
	$(RUN) scripts/torture $(TORTURE)

lock: ## choose the versions anew; needs uv
	uv pip compile pyproject.toml --extra arrow --group dev --universal --python-version 3.11 --upgrade \
		--generate-hashes --no-emit-index-url --no-header --no-annotate --quiet -o requirements.lock

clean: ## remove what make made
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
