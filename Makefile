# Every command of the project. `make` alone lists them.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.setup-stamp
MEMBERS := packages/kv-core packages/kv-bus packages/kv-consistency packages/kv-prefix packages/kv-transport packages/kv-client services
PROJECTS := $(MEMBERS:%=%/pyproject.toml)
PYTEST_ARGS ?=

.DEFAULT_GOAL := help

help: ## List the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: $(STAMP) ## Make .venv with every package and pinned dependency

$(STAMP): constraints.txt pyproject.toml $(PROJECTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; say which with make PYTHON=..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "venv is missing: apt-get install python3-venv"; exit 1; }
	@echo "installing pinned dependencies into $(VENV) (about a minute the first time)"
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -r requirements-dev.txt
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt $(MEMBERS:%=-e ./%)
	@touch $(STAMP)

demo: setup ## Start a cluster on this machine, answer chat requests with a real model, prove the tokens
	@$(BIN)/kvctl demo

test: setup ## Run the whole test suite
	@$(BIN)/pytest $(PYTEST_ARGS)

check: setup ## Lint, format, types, import contracts, links in the docs
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy packages/*/src services/src tests bench
	@$(BIN)/lint-imports --no-logo pyproject.toml
	@$(BIN)/python -m tests.docs_links

clean: ## Remove everything that was built
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find packages services \( -name '*.egg-info' -o -name build -o -name dist \) -prune -exec rm -rf {} +
	find packages services -name '*.so' -delete

.PHONY: help setup demo test check clean
