# `make test` and `make demo` need nothing but make and Python 3.11 or newer: they build .venv themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help test test-lowest coverage check check-migrations demo format install audit clean

help:
	@echo "make demo          five agents and a coordinator on this machine, ending in a prediction"
	@echo "make test          every check and every test"
	@echo "make check         formatting, lint, types, imports, migrations"
	@echo "make format        fix formatting and what the linter can fix"
	@echo "make test-lowest   tests with the lowest dependency versions that are allowed"
	@echo "make coverage      tests, with the lines that none of them runs"
	@echo "make audit         known vulnerabilities of what is installed"
	@echo "make install       build .venv and nothing else"
	@echo "make clean         remove .venv and caches"

# Tools of other people, for tests of the APIs; apart, because their dependencies are not ours.
GENERATORS := $(VENV)/generators
GENERATORS_STAMP := $(GENERATORS)/.installed

# One test process a core, each computing with one thread: more threads than cores slow all of them down.
PYTEST = PATH="$$PATH:$(CURDIR)/$(GENERATORS)/bin:$(CURDIR)/$(GENERATORS)/node_modules/.bin" OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=auto --dist=worksteal --durations=25

test: check $(GENERATORS_STAMP)
	$(PYTEST)

# The same with a report of the lines that no test runs, here and in htmlcov; takes longer.
coverage: check $(GENERATORS_STAMP)
	$(PYTEST) --cov --cov-report=term --cov-report=html

# The lowest releases that pyproject.toml allows, in an environment of their own, with today's test tools; warnings that old
# releases cause are no errors, and anyio's plugin for pytest is not needed.
LOWEST := $(VENV)/lowest
LOWEST_TESTS = tests/unit/shared tests/unit/server tests/unit/client_agent tests/unit/lab/test_runs.py \
	tests/unit/lab/test_paper_figures.py tests/e2e/test_server_command_line.py tests/integration/test_api_access.py \
	tests/integration/test_api_federations.py tests/integration/test_api_openapi.py tests/integration/test_blob_stores.py \
	tests/integration/test_predict_api.py tests/integration/test_schema.py tests/integration/test_service_records.py \
	tests/integration/test_service_uploads.py

test-lowest:
	$(PYTHON) -m venv --clear $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(LOWEST)/bin/uv --system-certs pip compile --quiet --no-deps --resolution=lowest-direct --extra=figures --extra=ray --extra=s3 \
		--output-file=$(LOWEST)/lowest.txt pyproject.toml
	$(LOWEST)/bin/uv --system-certs pip install --quiet --python=$(LOWEST)/bin/python --constraint=$(LOWEST)/lowest.txt --editable='.[test,figures]'
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest --numprocesses=auto --dist=worksteal -p no:anyio \
		--override-ini=filterwarnings=default $(LOWEST_TESTS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	make --silent check-migrations

# The tables of the code are those that the migrations make.
check-migrations: $(STAMP)
	@scratch=$$(mktemp -d) && export DISTRANS_DB="sqlite:///$$scratch/check.db" \
		&& $(BIN)/alembic upgrade head && $(BIN)/alembic check; status=$$?; rm -r "$$scratch"; exit $$status

demo: $(STAMP)
	$(BIN)/distrans-lab demo

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

install: $(STAMP)

# Known vulnerabilities of what is installed; asks a service on the network, so it is no part of `make test`.
audit: $(STAMP)
	$(PYTHON) -m venv $(VENV)/audit
	$(VENV)/audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit
	$(VENV)/audit/bin/pip-audit --skip-editable --path $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

# Remade when the dependencies or the version change. A failed install leaves no stamp behind, so the next run tries again.
$(STAMP): pyproject.toml shared/__init__.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; name one with: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' || \
		{ echo "This Python has no venv module; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@

# Without npm, or a way to its packages, the tests that need them are skipped; with CI=true they fail.
$(GENERATORS_STAMP): tests/generators/requirements.txt tests/generators/package.json | $(STAMP)
	$(PYTHON) -m venv $(GENERATORS)
	$(GENERATORS)/bin/python -m pip install --quiet --disable-pip-version-check --requirement tests/generators/requirements.txt
	@cp tests/generators/package.json $(GENERATORS)/
	npm install --prefix $(GENERATORS) --silent --fetch-retries=1 --no-audit --no-fund --no-package-lock --ignore-scripts || \
		echo "no npm, or no way to its packages: tests of TypeScript clients and of tus-js-client are skipped"
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis htmlcov .coverage
