# `make demo` and `make test` are all a fresh machine needs; both set up .venv first.
PYTHON ?= python3
BIN := .venv/bin
# Two files of tests at a time: most tests wait for ranks, more than they compute.
WORKERS := -n 2 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help demo test slow test-gpu bench-gpu site site-test bench format lint clean

help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: .venv/installed ## train on real text on 8 local ranks (dp 2 x tp 2 x pp 2), and prove it equal to one process
	rm -rf runs/demo
	$(BIN)/minipar train --name demo --dp 2 --tp 2 --pp 2 --microbatches 4 --eval-every 25 --checkpoint-every 50

test: .venv/installed lint ## lint, every test, every notebook
	$(BIN)/python -m pytest $(WORKERS)
	$(BIN)/python -m pytest $(WORKERS) --nbmake --nbmake-timeout=120 lessons

slow: .venv/installed ## the same properties over more examples and larger worlds; then by NCCL's rules, and without shared memory
	HYPOTHESIS_PROFILE=slow $(BIN)/python -m pytest $(WORKERS) -m 'slow or not slow'
	MINIPAR_TRANSPORT=grouped $(BIN)/python -m pytest $(WORKERS)
	MINIPAR_TRANSPORT=tagged $(BIN)/python -m pytest $(WORKERS) tests/comm tests/data_parallel tests/spec

test-gpu: .venv/installed ## the tests on GPUs, by NCCL; then a table, and docs/gpu.md. Without a GPU, one line
	$(BIN)/python -m tests.gpu

bench-gpu: .venv/installed ## the benchmarks on GPUs, against NCCL and torch's kernels. Without a GPU, one line
	$(BIN)/python -m benchmarks --device cuda

site: .venv/site-installed ## README, lessons, book, museum, API and interactive pages as a static site: build/site
	$(BIN)/python -m website.build

site-test: site ## the site in a real browser, where Chromium is installed
	$(BIN)/python -m pytest tests/website

.venv/site-installed: .venv/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[site]'
	touch $@

bench: .venv/installed ## time minipar against torch's own, as ratios
	$(BIN)/minipar bench

lint: .venv/installed ## formatter, linter and type checker, changing nothing
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy --strict --follow-imports=silent --no-error-summary tests/typed

format: .venv/installed ## format the code and fix what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove the environment, caches and runs
	rm -rf .venv runs build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
