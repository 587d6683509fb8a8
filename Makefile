# `make test` and `make demo` need only make and Python 3.11 or newer; they create .venv themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DIST := dist

.PHONY: help test test-lowest coverage check check-migrations demo docs build format install audit clean

help:
	@echo "make demo          run a coordinator and ten agents on this machine, up to a prediction"
	@echo "make test          run every check and every test"
	@echo "make check         check formatting, lint, types, imports and migrations"
	@echo "make docs          build the documentation site in build/docs"
	@echo "make format        fix formatting, and lint where ruff can"
	@echo "make coverage      run the tests and report lines that none of them executes"
	@echo "make test-lowest   run tests with the lowest dependency versions allowed (downloads 6 GB)"
	@echo "make build         build and check the wheel and the source distribution in dist/"
	@echo "make audit         list known vulnerabilities in installed packages (needs the network)"
	@echo "make install       create .venv and nothing else"
	@echo "make clean         remove .venv, caches and builds"

# Third-party tools for API tests, in a separate environment because their dependencies conflict with ours.
GENERATORS := $(VENV)/generators
GENERATORS_STAMP := $(GENERATORS)/.installed

# One worker per core and one thread per worker: more threads than cores slow everything down.
PYTEST_ENV = PATH="$$PATH:$(CURDIR)/$(GENERATORS)/bin:$(CURDIR)/$(GENERATORS)/node_modules/.bin" OMP_NUM_THREADS=1
PYTEST_ARGS = --numprocesses=auto --dist=worksteal

test: check $(GENERATORS_STAMP)
	$(PYTEST_ENV) $(BIN)/python -m pytest $(PYTEST_ARGS) --durations=25

# Slower than `make test`; the HTML report is in htmlcov.
coverage: check $(GENERATORS_STAMP)
	$(PYTEST_ENV) $(BIN)/python -m pytest $(PYTEST_ARGS) --cov --cov-report=term --cov-report=html

# Runtime dependencies at their lower bounds, test tools at their latest releases. Old releases raise warnings that are
# not our concern, and anyio's pytest plugin is not needed.
LOWEST := $(VENV)/lowest
LOWEST_TESTS := tests/unit tests/integration

test-lowest: $(GENERATORS_STAMP)
	$(PYTHON) -m venv --clear $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(LOWEST)/bin/uv --system-certs pip compile --quiet --no-deps --resolution=lowest-direct --extra=figures --extra=ray --extra=s3 \
		--output-file=$(LOWEST)/lowest.txt pyproject.toml
	$(LOWEST)/bin/uv --system-certs pip install --quiet --python=$(LOWEST)/bin/python --constraint=$(LOWEST)/lowest.txt --editable='.[test,figures]'
	$(PYTEST_ENV) $(LOWEST)/bin/python -m pytest $(PYTEST_ARGS) -p no:anyio --override-ini=filterwarnings=default $(LOWEST_TESTS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	make --silent check-migrations

# Fail if the tables in the code differ from what the migrations create.
check-migrations: $(STAMP)
	@scratch=$$(mktemp -d) && export DISTRANS_DB="sqlite:///$$scratch/check.db" \
		&& $(BIN)/alembic upgrade head && $(BIN)/alembic check; status=$$?; rm -r "$$scratch"; exit $$status

# Strict and offline; open build/docs/index.html.
docs: $(STAMP)
	$(BIN)/python -m docs._tools build/docs

demo: $(STAMP)
	$(BIN)/distrans-lab demo

# tests/e2e/test_installed_wheel.py installs the result and starts all three programs.
build: $(STAMP)
	rm -rf $(DIST)
	$(BIN)/python -m build --no-isolation --outdir $(DIST)
	$(BIN)/twine check --strict $(DIST)/*

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

install: $(STAMP)

# Not part of `make test` because it queries a service on the network.
audit: $(STAMP)
	$(PYTHON) -m venv $(VENV)/audit
	$(VENV)/audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit
	$(VENV)/audit/bin/pip-audit --skip-editable --path $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

# Rebuilt when dependencies or the version change. A failed install leaves no stamp, so the next run tries again.
$(STAMP): pyproject.toml shared/__init__.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "DisTrans needs Python 3.11 or newer. Choose one with: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' || \
		{ echo "This Python has no venv module. On Debian and Ubuntu, run: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@

# Without npm or access to its registry, tests that need it are skipped; with CI=true they fail.
$(GENERATORS_STAMP): tests/generators/requirements.txt tests/generators/package.json | $(STAMP)
	$(PYTHON) -m venv $(GENERATORS)
	$(GENERATORS)/bin/python -m pip install --quiet --disable-pip-version-check --requirement tests/generators/requirements.txt
	@cp tests/generators/package.json $(GENERATORS)/
	npm install --prefix $(GENERATORS) --silent --fetch-retries=1 --no-audit --no-fund --no-package-lock --ignore-scripts || \
		echo "npm is missing or cannot reach its registry: skipping tests of TypeScript clients and tus-js-client"
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis htmlcov .coverage $(DIST)
