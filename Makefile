# `make demo` and `make test` are all a fresh machine needs; both set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VERSIONS := --constraint constraints.txt
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(VERSIONS)
# Two files of tests at a time: a test has several ranks, and a third file only makes the other two slower on two cores.
WORKERS := -n 2 --dist loadfile --no-loadscope-reorder
# The tests start hundreds of processes, and each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test quick newest test-all slow soak mutate test-gpu bench-gpu site site-test lighthouse bench format lint clean needs-browser

help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

# .venv/installed is there once the environment is whole, .venv/installing while a new one is being made: what a broken
# try left is removed. A .venv that somebody else made has neither; it is installed into, and never removed.
$(VENV)/installed: pyproject.toml constraints.txt
	@if [ -e $(VENV)/installing ]; then $(REMOVE); fi
	@[ ! -e $(VENV) ] || [ -x $(VENV)/bin/python ] \
	  || { echo "make needs $(VENV)/bin/python, which $(VENV) has not; remove it: rm -rf $(VENV)" >&2; exit 1; }
	@[ -e $(VENV) ] || command -v $(PYTHON) >/dev/null \
	  || { echo "make needs Python 3.11 or later; $(PYTHON) is not installed: make PYTHON=..." >&2; exit 1; }
	@[ -e $(VENV) ] || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "make needs Python 3.11 or later; $(PYTHON) is $$($(PYTHON) --version 2>&1 | head -n 1): make PYTHON=..." >&2; exit 1; }
	@[ -e $(VENV) ] || $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo "make needs Python's venv, which $(PYTHON) has not: apt install python3-venv, or make PYTHON=..." >&2; exit 1; }
	@[ -e $(VENV) ] || echo "making $(VENV): torch and other packages are fetched, which takes some minutes"
	@[ -e $(VENV) ] || { mkdir -p $(VENV) && touch $(VENV)/installing && said=$$($(PYTHON) -m venv $(VENV) 2>&1); } \
	  || { $(REMOVE); echo "make needs an environment, but $(PYTHON) -m venv says: $$said" | head -n 1 >&2; exit 1; }
	@said=$$($(PIP) --editable '.[dev]' 2>&1) \
	  || { if [ -e $(VENV)/installing ]; then $(REMOVE); fi; $(PIP_FAILED); }
	@rm -f $(VENV)/installing
	@touch $@

$(VENV)/site-installed: $(VENV)/installed
	@said=$$($(PIP) --editable '.[site]' 2>&1) || { $(PIP_FAILED); }
	@touch $@

$(VENV)/mutation-installed: $(VENV)/installed
	@said=$$($(PIP) --editable '.[mutation]' 2>&1) || { $(PIP_FAILED); }
	@touch $@

# The mark goes last: what a broken removal leaves is removed by the next try, and not taken for somebody's .venv.
REMOVE = find $(VENV) -mindepth 1 -maxdepth 1 ! -name installing -exec rm -rf {} + 2>/dev/null; rm -rf $(VENV)
# Without a network pip warns of the cause, and its error is that versions conflict.
WHY = echo "$$said" | grep -o -m 1 '\[Errno [^]]*\] [A-Za-z ]*' || echo "$$said" | grep -i -m 1 '^ *error' || echo "$$said" | tail -n 1
PIP_FAILED = echo "make needs a package index, by network: pip says $$($(WHY))" >&2; exit 1

demo: $(VENV)/installed ## train on real text on 8 local ranks (dp 2 x tp 2 x pp 2), and prove it equal to one process
	rm -rf runs/demo
	$(BIN)/minipar train --name demo --dp 2 --tp 2 --pp 2 --microbatches 4 --eval-every 25 --checkpoint-every 50

# The type checker runs beside the notebooks, which are first and sleep a good part of their time.
test: $(VENV)/installed ## what a change needs: lint, every claim on fewer examples, every notebook
	@$(MAKE) --no-print-directory --jobs 2 lint quick

quick: $(VENV)/installed ## the tests of `make test` without lint
	$(BIN)/python -m pytest $(WORKERS) --quick -p tests.notebooks tests lessons

newest: ## the tests of `make quick` with the newest version of each package, in build/newest; TORCH=torch==2.13.0: of torch this
	rm -rf build/newest
	@$(MAKE) --no-print-directory quick VENV=build/newest VERSIONS="$(TORCH)"

test-all: $(VENV)/installed ## every test on all its examples (half an hour on two idle cores)
	$(BIN)/python -m pytest $(WORKERS)

slow: $(VENV)/installed ## the same properties over more examples and larger worlds; then by NCCL's rules, and without shared memory
	HYPOTHESIS_PROFILE=slow $(BIN)/python -m pytest $(WORKERS) -m 'slow or not slow'
	MINIPAR_TRANSPORT=grouped $(BIN)/python -m pytest $(WORKERS)
	MINIPAR_TRANSPORT=tagged $(BIN)/python -m pytest $(WORKERS) tests/comm tests/data_parallel tests/spec

soak: $(VENV)/installed ## for an hour, or SOAK_MINUTES: drawn runs equal one process, and go on when something ends them
	SOAK_MINUTES=$${SOAK_MINUTES:-60} $(BIN)/python -m pytest -m slow tests/train/verification/test_drawn_configs.py tests/train/test_chaos.py

mutate: $(VENV)/mutation-installed ## plant SAMPLE small faults in the room ROOM of minipar, one at a time: which do its tests miss?
	$(BIN)/python -m tests.mutation "$(ROOM)" --sample "$(or $(SAMPLE),60)" --seed "$(or $(SEED),0)"

test-gpu: $(VENV)/installed ## the tests on GPUs, by NCCL; then a table, and docs/generated/gpu.md. Without a GPU, one line
	$(BIN)/python -m tests.gpu

bench-gpu: $(VENV)/installed ## what only a GPU can say, in ten minutes; writes docs/gpu.md. Without a GPU, one line
	$(BIN)/python -m benchmarks.on_gpu

site: $(VENV)/site-installed ## README, lessons, book, museum, API and interactive pages as a static site: build/site (needs npm)
	@$(BIN)/python -m website.build

site-test: needs-browser site ## the site in a real browser (needs Chromium and its driver)
	$(BIN)/python -m pytest tests/website

lighthouse: needs-browser $(VENV)/site-installed ## Lighthouse's scores of the built site, on an idle machine (needs npm and Chromium)
	$(BIN)/python -m website.lighthouse

needs-browser:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null \
	  || { echo "make $(MAKECMDGOALS) needs chromium and chromedriver: apt install chromium chromium-driver" >&2; exit 1; }

bench: $(VENV)/installed ## time minipar against torch's own, as ratios
	$(BIN)/minipar bench

lint: $(VENV)/installed ## formatter, linter and type checker, changing nothing
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy --no-error-summary minipar benchmarks tests/typed

format: $(VENV)/installed ## format the code and fix what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove the environment, caches and runs
	@if [ -e $(VENV) ]; then touch $(VENV)/installing && rm -f $(VENV)/*installed && $(REMOVE); fi
	rm -rf runs build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
