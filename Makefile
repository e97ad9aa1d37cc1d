# Each target makes or updates .venv by itself. PYTHON picks the interpreter that makes it: make setup PYTHON=python3.12
# pip knows where this machine has its PyTorch from, and uv brings the rest in half of the time.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
ARGS ?=

# Tests wait more than they compute, so two more at a time than there are cores, up to eight; whole files, since the tests
# of one share meshes. ARGS="-n 0 tests/..." runs tests one after the other.
CORES := $(shell nproc)
TOGETHER := --dist loadfile --no-loadscope-reorder
JOBS ?= $(shell echo $$(($(CORES) < 6 ? $(CORES) + 2 : 8)))

# Tests start hundreds of interpreters, which would compile all of our modules each.
export PYTHONDONTWRITEBYTECODE :=
COUNT_CALLS := tests/runtime/controller/test_call_costs.py tests/runtime/tensors/steps/test_step_costs.py

.PHONY: setup fix check test test-slow test-nightly test-all test-gpu test-ipykernels test-pythons notebooks bench turns bench-peers monarch guests faults demo changelog lab verify-gpu notebooks-save pictures coverage docs
.DEFAULT_GOAL := test

setup: $(READY)

# What Jupyter finds in its own folders is copied there, so a change makes the copies again.
COPIED := kernel/meshbook_kernel/kernelspec/kernel.json $(shell find extension/meshbook_extension/browser -type f)

$(READY): pyproject.toml constraints.txt $(COPIED)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing PyTorch, Jupyter and the tools into .venv; the first time this takes minutes."
	@$(BIN)/python -m pip install -q --no-compile -c constraints.txt uv torch
	@$(BIN)/python -m uv pip install -q --compile-bytecode -p $(BIN)/python -c constraints.txt -e '.[dev]'
	@-$(BIN)/python -m pytest --collect-only -q >/dev/null 2>&1  # pytest compiles the tests once, not in each of its processes
	@touch $@

# Packages whose scripts some slow tests run, or that notebooks import; where they cannot be had, those tests are skipped.
.venv/.guests: $(READY)
	@$(BIN)/python -m uv pip install -q -p $(BIN)/python -c constraints.txt --group guests && touch $@ || \
		echo "Accelerate, Lightning and others of the group guests could not be installed: their tests are skipped." >&2

# The programs of others that `make guests` runs, with their packages, in an environment of their own.
.bench/guests/.ready: pyproject.toml constraints.txt $(READY)
	$(BIN)/python -m venv --clear .bench/guests
	@.bench/guests/bin/python -m pip install -q --no-compile -c constraints.txt uv torch
	@.bench/guests/bin/python -m uv pip install -q -p .bench/guests/bin/python -c constraints.txt -e ".[notebook]" --group guests --group programs
	@touch $@

# Programs of others by torchrun and by %mesh run, without a network, into docs/guests.md: make guests GUESTS=DIR, where DIR
# has clones of their repositories. ARGS="--only nanoGPT" runs some, and writes no page.
guests: .bench/guests/.ready
	@test -n "$(GUESTS)" || { echo "name the folder with your clones: make guests GUESTS=DIR" >&2; exit 2; }
	.bench/guests/bin/python -m benchmarks.guests $(GUESTS) $(ARGS)

fix: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

check: $(READY)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/support/check_rooms.py
	$(BIN)/python tests/support/figures.py
	$(BIN)/python tests/support/check_commits.py

test: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) $(TOGETHER) $(ARGS)

# What is long, needs a browser, a kernel for each test or a cluster, or serves programs written for Monarch.
test-slow: $(READY) .venv/.guests
	$(BIN)/python -m pytest -m '(slow or cluster or kernel or monarch) and not nightly' -n $(JOBS) $(TOGETHER) $(ARGS)

# Long searches: random programs and faults, every operator, and further kinds of what test-slow has one of.
test-nightly: $(READY)
	$(BIN)/python -m pytest -m nightly -n $(JOBS) $(TOGETHER) $(ARGS)

test-all: test test-slow test-nightly

# On a machine with a CUDA device; one is enough. Elsewhere all of it is skipped.
test-gpu: $(READY)
	$(BIN)/python -m pytest -n 0 $(ARGS) tests/gpu

# Shows on one GPU what holds there, within ten minutes, and writes docs/verified.md; ARGS="--device cpu" does the same over
# gloo. A machine with a GPU has PyTorch for it, so without .venv its own interpreter runs this, and nothing is installed.
VERIFY_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
verify-gpu:
	PYTHONPATH="$(CURDIR)/runtime:$(CURDIR)/kernel:$(CURDIR)/extension:$(CURDIR)" $(VERIFY_PYTHON) -m benchmarks.verify --write docs/verified.md $(ARGS)

# The tests that depend on how ipykernel takes its messages, under other versions of it; each downloads 120 kB.
test-ipykernels: $(READY)
	$(BIN)/python tests/support/other_ipykernel.py 7.3.0 $(ARGS)
	$(BIN)/python tests/support/other_ipykernel.py 6.29.5 $(ARGS)

# A short suite under 3.10 to 3.13, those that this machine has, with the oldest and newest dependencies: see noxfile.py.
# ARGS="-s python-3.10 python-3.13" names some of them; with INSTALL_WITHIN=300 one whose packages take longer to come is
# left out; pytest's own arguments come last, behind "--".
test-pythons: $(READY)
	$(BIN)/python -m nox $(ARGS)

# How much of the code the tests run, in all processes that end by themselves: agents, templates, ranks and kernels too.
# What counts calls of Python is left out. The last line has the whole. Tests of debuggers fail under it.
coverage: $(READY)
	rm -rf build/coverage
	-$(BIN)/python -m coverage run -m pytest -n $(JOBS) $(TOGETHER) $(COUNT_CALLS:%=--ignore=%) $(ARGS)
	$(BIN)/python -m coverage combine -q
	$(BIN)/python -m coverage report --sort=cover

notebooks: $(READY) .venv/.guests
	$(BIN)/python -m pytest -m "" tests/notebooks $(ARGS)

# Executes the notebooks, those that ARGS names or all, and keeps their outputs in them: see CONTRIBUTING.md.
notebooks-save: $(READY) .venv/.guests
	$(BIN)/python -m notebooks.save $(ARGS)

bench: $(READY)
	$(BIN)/python -m benchmarks $(ARGS)

# This checkout beside another one, in turns: make turns BEFORE=DIR ONLY=calls,payloads
turns: $(READY)
	$(BIN)/python -m benchmarks.turns $(BEFORE) $(if $(ONLY),--only $(ONLY)) $(ARGS)

bench-peers: $(READY)
	$(BIN)/python -m benchmarks.peers $(ARGS)

# Programs of ours under Monarch, whose wheel goes into .bench, and here: only the import changes. ARGS=--page writes
# docs/monarch.md.
monarch: $(READY)
	$(BIN)/python -m benchmarks.monarch $(ARGS)

faults: $(READY)
	$(BIN)/python -m benchmarks.faults $(ARGS)

# The site of docs/ in build/site, with the API from docstrings and the notebooks with their outputs. To read it while you
# write: ARGS="--watch", at http://127.0.0.1:8000.
docs: export NO_MKDOCS_2_WARNING := 1
docs: $(READY)
	$(BIN)/mkdocs $(if $(filter --watch,$(ARGS)),serve,build --strict --quiet $(ARGS))

# The screenshots of the README, of cells that really run; wants a chromium. ARGS="hang" makes some of them.
pictures: $(READY)
	$(BIN)/python tests/support/pictures.py $(ARGS)

# Joins the fragments of changes/ into CHANGELOG.md for a release; ARGS=--draft only shows how that will look.
changelog: $(READY)
	$(BIN)/python -m towncrier build --yes $(ARGS)

demo: $(READY)
	$(BIN)/python notebooks/run.py notebooks/quickstart.ipynb

lab: $(READY)
	$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) $(ARGS) notebooks/quickstart.ipynb
