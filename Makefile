# The commands of this project. Each sets up all it needs by itself; only Python 3.11+ and make are required.

PYTHON ?= python3
VENV   ?= .venv
RUN     = $(VENV)/bin

# Tests start hundreds of Python processes: without this, where it is set, each would compile the library anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo shop test load chaos queue-chaos model simulate docs lint format audit bench bench-queue clean

help: ## Show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# One environment for everything, made anew whenever the project's requirements change.
$(VENV)/.ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; name one with PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(RUN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: $(VENV)/.ready ## Three workers share a table while one is killed, one joins, one leaves
	$(RUN)/jobsync-orm demo

shop: $(VENV)/.ready ## An online shop: 10,000 orders, workers killed on the way, each order paid once (ORDERS=n)
	cd examples && $(abspath $(RUN))/python -m shop $(if $(ORDERS),--orders $(ORDERS))

test: $(VENV)/.ready ## Run the tests on a real PostgreSQL (an embedded one, or JOBSYNC_TEST_URL)
	$(RUN)/python -m pytest -n 4 --dist worksteal

load: $(VENV)/.ready ## The tests that are too long for every run: many jobs, long outages, long memory (JOBS=n)
	$(if $(JOBS),JOBS=$(JOBS)) $(RUN)/python -m pytest -m load -n 2 --dist worksteal

# Seconds of faults, and the seed that decides them (a new one each time if it is not given; it is printed).
DURATION ?= 60
SEED     ?=

chaos: $(VENV)/.ready ## Real workers under kills, pauses, broken networks and restarts, checked (DURATION=seconds SEED=n)
	$(RUN)/python -m pytest -q -m chaos tests/chaos
	$(RUN)/python -m tests.chaos.run --duration $(DURATION) $(if $(SEED),--seed $(SEED))

queue-chaos: $(VENV)/.ready ## Ordered jobs of 200 keys while workers are killed, checked (DURATION=seconds SEED=n)
	$(RUN)/python -m tests.chaos.keys.run --duration $(DURATION) $(if $(SEED),--seed $(SEED))

# Searches of the hand-off protocol that are too long for every run of the tests.
STATES ?= 5000000

model: $(VENV)/.ready ## Search the model of the hand-off further (STATES=n, a few GB of memory)
	$(RUN)/python -m tests.model.handoff --states $(STATES)
	$(RUN)/python -m tests.model.handoff --states $(STATES) --peers 3

SEEDS ?= 20000

simulate: $(VENV)/.ready ## Run the simulation of the coordinator on more seeds (SEED=first SEEDS=count)
	SEED=$(or $(SEED),100000) SEEDS=$(SEEDS) $(RUN)/python -m pytest tests/simulation/test_seeds.py -m chaos -q

docs: $(VENV)/.ready ## Build the documentation site, build/docs/html/index.html; a warning is an error
	$(RUN)/python -m sphinx -q -W --keep-going -b html -d build/docs/doctrees docs build/docs/html

lint: $(VENV)/.ready ## Check style, types and the direction of imports
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	$(RUN)/lint-imports

format: $(VENV)/.ready ## Format the code
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

# In an environment of its own, with what a user installs: the newest releases that the requirements allow.
AUDIT_ENV = .venv-audit

audit: pyproject.toml ## Look the dependencies up in a database of known vulnerabilities (needs the network)
	$(PYTHON) -m venv $(AUDIT_ENV)
	$(AUDIT_ENV)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(AUDIT_ENV)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip-audit -e '.[test]'
	$(AUDIT_ENV)/bin/python -m pip freeze --exclude-editable > $(AUDIT_ENV)/installed.txt
	$(AUDIT_ENV)/bin/pip-audit --strict --disable-pip --no-deps --requirement $(AUDIT_ENV)/installed.txt

clean: ## Remove the environment and caches
	rm -rf $(VENV) $(AUDIT_ENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build

# An environment for each library; the original's has no room for ours.
BENCH_ENV   = benchmarks/.venv
BENCH_MODE ?= quick
BENCH_ONLY ?=

$(BENCH_ENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(BENCH_ENV)/ours
	$(BENCH_ENV)/ours/bin/python -m pip install --quiet --disable-pip-version-check -e '.[bench]'
	$(PYTHON) -m venv $(BENCH_ENV)/original
	$(BENCH_ENV)/original/bin/python -m pip install --quiet --disable-pip-version-check jobsync 'psycopg[binary]' psutil
	@touch $@

bench: $(BENCH_ENV)/.ready ## Measure this library beside the original, write docs/benchmarks.md (BENCH_MODE=full, BENCH_ONLY=step,...)
	$(BENCH_ENV)/ours/bin/python -m benchmarks.run --original $(BENCH_ENV)/original/bin/python --mode $(BENCH_MODE) $(if $(BENCH_ONLY),--only $(BENCH_ONLY))

QUEUE_BENCH_ENV = benchmarks/.venv/queue

$(QUEUE_BENCH_ENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(QUEUE_BENCH_ENV)
	$(QUEUE_BENCH_ENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[bench]' asyncpg pgqueuer procrastinate
	@touch $@

bench-queue: $(QUEUE_BENCH_ENV)/.ready ## Measure the queue beside others', write docs/benchmarks-queue.md (BENCH_ONLY=drain,...)
	$(QUEUE_BENCH_ENV)/bin/python -m benchmarks.queue.run $(if $(BENCH_ONLY),--only $(BENCH_ONLY))
