# What a developer types. `make` alone says it all.

VENV   := .venv
LOCK   := requirements.lock
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PYTHON ?= python3

# Programs and tests are compiled once, not by each process that a test starts.
unexport PYTHONDONTWRITEBYTECODE

# Scripts find python3 and wald where setup put them.
RUN    := PATH="$(abspath $(BIN)):$$PATH"

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup check fix test test-named test-failed test-slow test-wheel test-spark test-spark-4.2 docs screenshots demo bench bench-spark torture manual deb lock clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9.-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## .venv with the locked packages and wald itself, editable; Java, where it may be installed

$(READY): $(LOCK) pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "wald needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $(LOCK)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	$(RUN) scripts/java
	@touch $@

check: $(READY) ## format, lint, types, who imports whom, links and words of the documents
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -q tests/test_layers.py tests/test_tidy.py tests/docs/test_pages.py

fix: $(READY) ## fix formatting, and write the generated parts of docs/
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python scripts/make-docs

# Three processes for each core, as tests wait for syncs and for daemons. They get tests from tests/support/sharing.py.
PARALLEL := -n $(shell expr 3 \* $$(nproc)) --maxprocesses 8 --dist loadscope

test: $(READY) ## the tests that need neither Spark nor minutes, in parallel
	$(BIN)/pytest $(PARALLEL) -m 'not slow and not spark'

test-named: $(READY) ## the tests in TESTS, in parallel: files, or @FILE with a name per line
	$(BIN)/pytest $(PARALLEL) $(TESTS)

test-failed: $(READY) ## the tests that failed in the last run, one at a time
	$(BIN)/pytest --last-failed --last-failed-no-failures none

test-slow: $(READY) ## those that take long: large data, many delays, many kills
	$(BIN)/pytest $(PARALLEL) -m 'slow and not spark' --ignore tests/test_wheel.py

test-wheel: $(READY) ## the wheel, built and installed by itself: its programs, packages and types, and tests of each package with it
	$(BIN)/pytest -q tests/test_wheel.py

test-spark: $(READY) ## those that do, with one session, a cluster, and drivers that are killed
	$(BIN)/pytest -q -m spark tests/sidecars/spark

test-spark-4.2: ## the same on the oldest PySpark that may be installed, in a .venv of its own
	$(MAKE) VENV=.venv-spark-4.2 LOCK=requirements-spark-4.2.lock test-spark

docs: $(READY) ## the documents as a site in docs/_build; a broken link or reference fails
	$(BIN)/sphinx-build --quiet --builder html --fresh-env --fail-on-warning --keep-going docs docs/_build

manual: $(READY) ## manual pages and completion for bash, zsh and fish, in dist/share
	$(BIN)/python scripts/make-manual dist/share

screenshots: $(READY) ## pictures of the gate's page, by Debian's Chromium, in dist/screenshots
	$(RUN) scripts/screenshots dist/screenshots

# So that equal commits make equal packages.
deb: export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || date +%s)
deb: $(READY) ## the Debian package, for the Python and the processor of this machine, in dist/
	$(RUN) scripts/make-deb dist

demo: $(READY) ## the main job on real text, then Spark, in a minute or two; INPUT=file to use your own
	$(RUN) scripts/demo

bench: $(READY) ## speed beside cat, dd, svlogd, s6-log, zstd and tar, in one run
	$(RUN) scripts/bench $(BENCH)

bench-spark: $(READY) ## the pipeline beside Spark's own readers; BENCH_SPARK=--quick for some minutes of it
	$(RUN) scripts/bench-spark $(BENCH_SPARK)

torture: $(READY) ## kill -9, again and again, under load; TORTURE='--mode mixed --minutes 60' for all faults at once
	$(RUN) scripts/torture $(TORTURE)

COMPILE := uv pip compile pyproject.toml --universal --python-version 3.11 \
	--generate-hashes --no-emit-index-url --no-header --no-annotate --quiet
EVERYTHING := --extra arrow --extra gate --extra spark --group dev
RUNTIME := --extra gate --extra s3 --extra ui

lock: ## choose the versions anew; needs uv
	$(COMPILE) $(EVERYTHING) --upgrade -o requirements.lock
	cp requirements.lock requirements-spark-4.2.lock
	$(COMPILE) $(EVERYTHING) --upgrade-package 'pyspark<4.3' -o requirements-spark-4.2.lock
	cp requirements.lock requirements-runtime.lock
	$(COMPILE) $(RUNTIME) -o requirements-runtime.lock

clean: ## remove what make made
	rm -rf .venv .venv-spark-4.2 .spark-cluster dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
