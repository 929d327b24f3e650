# Every target first prepares what it needs (a virtual environment, real servers) and prints what it does.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
# Tests start hundreds of programs: without bytecode on disk each would compile every module again.
unexport PYTHONDONTWRITEBYTECODE

VENV   ?= .venv
BIN    := $(VENV)/bin
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' && echo $$p && break; done)

# Size of the fault, load and simulation tests: small in `check` and `test`, full in `soak`.
CHECK_SCALE ?= 0.01
TEST_SCALE ?= 0.01
SOAK_SCALE ?= 1
# A fixed seed gives a fixed order and fixed schedules; `soak` uses a new one and prints it.
TEST_SEED  ?= 20261115
ifndef SOAK_SEED
SOAK_SEED  := $(shell $(PYTHON) -c 'import random; print(random.SystemRandom().randrange(2**31))')
endif
# Servers write thousands of files, which takes a quarter of the CPU time in memory.
SCRATCH    ?= $(shell [ "$$(df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 { print $$4 }')" -gt 6000000 ] 2>/dev/null && \
	! grep -q ' /dev/shm .*noexec' /proc/mounts && echo /dev/shm || echo "$${TMPDIR:-/tmp}")
# More than a machine of two cores has: tests mostly wait for servers.
WORKERS    ?= 8
PORT       ?= 8089
# Outside of the checkout, so that a new one need not check the types of all packages again.
export MYPY_CACHE_DIR ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/moored/mypy
# uv takes seconds where pip takes a minute, but it does not read pip's configuration (of a mirror, say).
UV         := VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install -q -c constraints.txt
PIP        := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt
PYTEST     := TMPDIR=$(SCRATCH) $(BIN)/python -m pytest -p no:cacheprovider
# Python's development mode enables asyncio's debug mode, which multiplies the time of pure tests: in
# `soak` only. With the default allocator, because the package has no C code for the debug hooks to check.
PYTEST_DEV := TMPDIR=$(SCRATCH) PYTHONMALLOC=pymalloc $(BIN)/python -X dev -m pytest -p no:cacheprovider

install = $(UV) $(1) || { echo "moored: uv failed; trying pip"; $(PIP) $(1); }
RUN_PACKAGES := -e '.[service,embedded,grpc]'
DEV_PACKAGES := -e '.[service,embedded,redis,dynamodb,sqlalchemy,asyncpg,aws,grpc,milvus,encryption,jwt]' -r requirements-dev.txt

say = @printf '\033[1m» %s\033[0m\n'

.PHONY: help run check pure test tests soak lint format bench bench-check docs compat conformance clean servers

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | \
		while IFS=$$'\t' read -r name text; do printf '  make %-12s %s\n' "$$name" "$$text"; done

$(VENV)/.made:
	$(say) "creating the virtual environment in $(VENV)"
	@[ -n "$(PYTHON)" ] || { echo "moored: Python 3.11 or newer is needed: install python3.11 or set PYTHON=…" >&2; exit 2; }
	@$(PYTHON) tools/make_venv.py $(VENV)
	@touch $@

$(VENV)/.run: $(VENV)/.made pyproject.toml constraints.txt
	$(say) "installing moored with its service, the embedded PostgreSQL and gRPC"
	@$(call install,$(RUN_PACKAGES))
	@touch $@

$(VENV)/.dev: $(VENV)/.made pyproject.toml constraints.txt requirements-dev.txt
	$(say) "installing moored with all its extras and the development tools"
	@$(call install,$(DEV_PACKAGES))
	@touch $(VENV)/.run $@

run: $(VENV)/.run ## Start the demo on 127.0.0.1:8089 (or PORT=…): a whole service, and a page to break it
	$(say) "starting the demo (Ctrl-C stops it)"
	@# In a terminal, Ctrl-C must reach only the service: make would exit first.
	@if [ -t 0 ]; then set -m; $(BIN)/moored serve --demo --port $(PORT); else exec $(BIN)/moored serve --demo --port $(PORT); fi

servers: ## Install the real servers that the tests use (needs root and apt)
	@$(PYTHON) tools/servers.py install

check: $(VENV)/.dev ## Lint, types and the pure tests, in under a minute: run it while working
	@$(MAKE) -j2 --output-sync=target lint pure

# Only the files with the marker, because importing all tests takes longer than running the pure ones.
pure: $(VENV)/.dev
	$(say) "tests that start no server and no program (seed $(TEST_SEED), scale $(CHECK_SCALE))"
	@MOORED_SCALE=$(CHECK_SCALE) MOORED_SEED=$(TEST_SEED) $(PYTEST) -q -m 'pure and not soak' --workers 2 --randomly-seed=$(TEST_SEED) --hypothesis-seed=$(TEST_SEED) $$(grep -rl 'pytest\.mark\.pure' --include='test_*.py' tests)

test: $(VENV)/.dev servers ## Lint, types, layers, docs and all tests, at small scale
	@# The table of contents of each page takes long, and has no warnings of its own.
	@$(MAKE) -j3 lint docs tests DOCS='-D toc_object_entries=0'

tests: $(VENV)/.dev
	$(say) "tests on $(WORKERS) workers (seed $(TEST_SEED), scale $(TEST_SCALE))"
	@MOORED_SCALE=$(TEST_SCALE) MOORED_SEED=$(TEST_SEED) $(PYTEST) -q -m 'not soak' --workers $(WORKERS) --durations=10 --randomly-seed=$(TEST_SEED) --hypothesis-seed=$(TEST_SEED)

soak: $(VENV)/.dev servers ## The same tests at full scale, with a new seed each time
	$(say) "soak at scale $(SOAK_SCALE) with seed $(SOAK_SEED): repeat it with make soak SOAK_SEED=$(SOAK_SEED)"
	@MOORED_SCALE=$(SOAK_SCALE) MOORED_SEED=$(SOAK_SEED) $(PYTEST_DEV) -q --workers $(WORKERS) --randomly-seed=$(SOAK_SEED) --hypothesis-seed=$(SOAK_SEED) --timeout=1800

lint: $(VENV)/.dev ## ruff, mypy --strict, import layers, documented public names
	$(say) "lint, format, types, layers, public names"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/python tools/public_names.py
	@$(BIN)/python tools/foreign_state.py

format: $(VENV)/.dev ## Let ruff fix and format the code
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: $(VENV)/.dev ## Build the documentation, strictly and offline, into docs/_build
	$(say) "documentation"
	@$(BIN)/sphinx-build -q -W --keep-going $(DOCS) -b html docs docs/_build/html

bench: $(VENV)/.dev ## Run every benchmark, print its table, and renew the table in README.md
	@for file in benchmarks/[a-z]*.py; do $(BIN)/python $$file --save; done
	@$(BIN)/python tools/figures.py

bench-check: $(VENV)/.dev ## Run the quick benchmarks against benchmarks/targets.toml
	@$(BIN)/python benchmarks/_check.py

compat: $(VENV)/.made ## Build sdist and wheel, check them, and try them with each Python from 3.11 to 3.15 that is found
	@MOORED_SEED=$(TEST_SEED) $(BIN)/python tools/compat.py

conformance: $(VENV)/.run ## Run other projects' tests with Moored's pools: DJANGO=… PROCRASTINATE=… LANGGRAPH=… (checkouts)
	@TMPDIR=$(SCRATCH) PYTHONPATH=. $(BIN)/python -m tools.conformance --django='$(DJANGO)' --procrastinate='$(PROCRASTINATE)' --langgraph='$(LANGGRAPH)'

clean: ## Remove the virtual environment and everything that was built
	rm -rf $(VENV) build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis
