# Same few commands everywhere; CI (.ci/run) calls these and nothing else.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
VLLM_VENV ?= .venv-vllm
# Processes that share the suite, one more than CI has cores: tests wait more than they compute.
JOBS   ?= 3
SOURCES := setup.py $(shell find gateway workers loadtests -name '*.py' -o -name '*.toml' -o -path '*/planner/configs/*.json' -o -path '*/static/*')

.PHONY: install run test test-compiled vllm test-vllm test-deploy test-engines test-e2e clients chaos chaos-steady check bench bench-vllm clean

install: $(VENV)/installed

$(VENV)/dependencies: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "warmlane needs Python 3.11 or newer: make PYTHON=python3.12 ..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --group dev
	WARMLANE_COMPILE=0 $(BIN)/python -m pip install --quiet --no-build-isolation .
	@touch $@

# The installed command is compiled where a C compiler is at hand (setup.py); tests in the tree run the source as it is.
$(VENV)/installed: $(VENV)/dependencies $(SOURCES)
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --force-reinstall .
	@rm -rf build warmlane.egg-info
	@touch $@

run: install
	$(BIN)/warmlane up

test: install
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# Core and data path once more, as they are installed: compiled. Needs a C compiler.
test-compiled: install
	@$(BIN)/python -P -c 'import gateway.core.router as r, sys; sys.exit(not r.__file__.endswith(".so"))' || { echo "not compiled: a C compiler and Python's headers are needed (Debian: gcc, python3-dev)" >&2; exit 1; }
	@rm -rf .cache/compiled && mkdir -p .cache/compiled && cp -r tests pyproject.toml .cache/compiled/
	cd .cache/compiled && $(abspath $(BIN))/python -m pytest -n $(JOBS) --dist worksteal tests/core tests/proxy tests/test_prompt.py

# Real vLLM for the CPU, and a tiny model for it.
vllm:
	PYTHON=$(PYTHON) sh tests/vllm/install.sh $(VLLM_VENV) .cache/tiny-model

test-vllm: install vllm
	VLLM_VENV=$(VLLM_VENV) $(BIN)/python -m pytest -m vllm tests/vllm

# deploy/: what promtool, docker-compose and systemd say of it, what needs curl, the install script's steps that need a network.
test-deploy: install
	PYTHON=$(PYTHON) sh tests/deploy/tools.sh .cache/deploy
	$(BIN)/python -m pytest -m deploy tests/deploy

# Engines other than vLLM that run here: llama.cpp's server.
test-engines: install
	PYTHON=$(PYTHON) sh tests/engines/install.sh .venv-llama
	$(BIN)/python -m pytest -m engines tests/engines

# The live page in a real browser: Debian's Chromium, driven by Playwright.
test-e2e: install
	PYTHON=$(BIN)/python sh tests/e2e/install.sh .cache/e2e
	$(BIN)/python -m pytest -m e2e tests/e2e

# Real SDKs and agents for test 19 of the fault tests: needs node and npm.
clients:
	PYTHON=$(PYTHON) sh tests/clients/install.sh .venv-clients .cache/clients

# Faults of replicas, clients and networks, with figures: tests/chaos/RESULTS.md. CHAOS_SHORT=1 is a short form.
chaos: install clients
	@rm -f .bench/chaos/figures.jsonl
	$(BIN)/python -m pytest -s -m chaos tests/chaos; status=$$?; $(BIN)/python -m tests.chaos.report; exit $$status

# Those of them that hold on a busy machine as well, in their short form.
CHAOS_STEADY := $(addprefix tests/chaos/,test_wire_framing.py test_29_security.py test_keys.py test_faults_loss.py \
	test_faults_health.py test_faults_drain.py test_faults_time.py test_redis.py)
chaos-steady: install
	CHAOS_SHORT=1 $(BIN)/python -m pytest -m chaos $(CHAOS_STEADY)

# Every script; the parts of deploy/install.sh are looked at through it.
SCRIPTS := .ci/run deploy/install.sh deploy/verify.sh $(wildcard tests/*/*.sh)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck --external-sources --check-sourced $(SCRIPTS)

bench: install
	$(BIN)/python -m loadtests.bench.run $(BENCH)

# Routers in front of real replicas: half an hour, or `make bench-vllm SMOKE=1`.
bench-vllm: install vllm
	VLLM_VENV=$(VLLM_VENV) $(BIN)/python -m loadtests.engines.run $(if $(SMOKE),--smoke) $(BENCH)

clean:
	rm -rf $(VENV) .venv-vllm .venv-llama .venv-clients tests/clients/drivers/node_modules .cache .bench build dist *.egg-info
