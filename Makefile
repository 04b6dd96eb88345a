# make demo    set up .venv, then show a real model speaking through a draft tree
# make test    set up .venv, then lint, types and tests, two at a time; stops at the first failing step
#
# PYTHON=/path/to/python3.12 picks the interpreter; DEMO_FLAGS and PYTEST_FLAGS go to the commands.

PYTHON ?=
DEMO_FLAGS ?=
PYTEST_FLAGS ?=
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help demo test lint clean venv-engine venv-dev

help:
	@sed -n 's/^# make/make/p' Makefile

venv-engine:
	@PYTHON="$(PYTHON)" sh scripts/setup_venv.sh engine

venv-dev:
	@PYTHON="$(PYTHON)" sh scripts/setup_venv.sh engine,dev

demo: venv-engine
	@$(BIN)/python -m ddtree demo $(DEMO_FLAGS)

lint: venv-dev
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

# Tests wait for servers more than they compute: two processes of one thread each take half the time of one.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile $(PYTEST_FLAGS)

# Keeps .venv (gigabytes to fetch again) and the user's cache folder.
clean:
	rm -rf build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
