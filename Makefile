# Works with GNU make 3.81 and newer on Linux, macOS and WSL. Nothing but Python and make is needed.
#
#   PYTHON=...     the interpreter to make the environment with (default: the newest suitable one)
#   VENV=...       where the environment lies
#   EXTRAS=cuda    extras to install as well (cuda, tpu, peers); they stay chosen afterwards
#   WORKERS=...    processes of the test suite
#   ARGS=...       further arguments of the command, e.g. make compare ARGS="--only mamba2"

SHELL := /bin/sh
VENV ?= .venv
PYTHON ?=
EXTRAS ?=
WORKERS ?= auto
ARGS ?=

# pytest itself and not `python -m pytest`, which would make the folders of this repository
# importable under their bare names.
PYTEST = '$(VENV)/bin/pytest' -q -n $(WORKERS) --maxprocesses 8 --dist worksteal --tb=short -ra

.DEFAULT_GOAL := help
.PHONY: help env compare test test-slow lint clean

help:
	@echo 'make compare    train the entries of configs/compare/quick.yaml and compare them'
	@echo 'make test       run the tests'
	@echo 'make test-slow  run the tests that take longer'
	@echo 'make lint       check the style'
	@echo 'make clean      remove build products and caches (not runs, not $(VENV))'

env:
	@PYTHON='$(PYTHON)' VENV='$(VENV)' EXTRAS='$(EXTRAS)' sh .ci/venv.sh

compare: env
	@'$(VENV)/bin/genlab' compare configs/compare/quick.yaml $(ARGS)

test: env
	@$(PYTEST) -m 'not slow' $(ARGS)

test-slow: env
	@$(PYTEST) -m slow $(ARGS)

lint: env
	@'$(VENV)/bin/ruff' check . $(ARGS)

clean:
	rm -rf build dist genlab.egg-info .cache .hypothesis .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
