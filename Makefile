# One virtual environment, .venv: every target builds what it needs of it, and only once.
#   make demo | test | coverage | test-vllm | lint | format | docs | bench-quick | bench-field | wheel | venv | dev | clean
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS ?= constraints.txt
# Python compiles modules when they are first used; pip would compile all there are, most of which nothing here uses.
PIP_INSTALL := $(BIN)/python -m pip install --no-compile -c $(CONSTRAINTS)
# Images of containers often forbid Python to keep what it has compiled: each process would then compile torch anew.
export PYTHONDONTWRITEBYTECODE :=
# In processes of one thread each: tiny models gain little from a second.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal

.DEFAULT_GOAL := demo
.PHONY: demo test coverage test-vllm lint format docs bench-quick bench-field wheel venv dev clean

demo: $(VENV)/.runtime
	@echo "An edit, where much of the answer stands in the prompt: what drafts are good at. Other prompts gain less."
	$(BIN)/paceline generate --file examples/fix-bug.txt --compare

test: $(VENV)/.dev
	$(PYTEST)

coverage: $(VENV)/.dev  ## the tests again, slower; fails below the share that pyproject.toml asks for
	$(PYTEST) --cov

test-vllm: $(VENV)/.dev  ## heads and drafters in vLLM, in an environment of its own (docs/vllm.md)
	$(BIN)/python tests/vllm/check.py
	$(BIN)/python tests/vllm/drafters.py --limit 1
	$(BIN)/python tests/vllm/sampled.py
	$(BIN)/python tests/vllm/faults.py
	$(BIN)/python tests/vllm/examples.py

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python benchmarks/check_figures.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

docs: $(VENV)/.dev  ## into build/site; a dead link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

bench-quick: $(VENV)/.runtime  ## three minutes: is this slower than the last release, or than BASE=COMMIT? ROWS=FILE keeps them
	PYTHON=$(BIN)/python benchmarks/quick.sh $(BASE)

bench-field: $(VENV)/.runtime  ## paceline beside other packages, which are installed under build/field (docs/field.md)
	$(BIN)/python benchmarks/field/run.py --work build/field --out $(or $(OUT),build/field/results) $(OPTIONS)

format: $(VENV)/.dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

wheel: $(VENV)/.dev  ## into dist/, with the native tier's library: whoever installs it needs no compiler
	PACELINE_PREBUILT=1 $(BIN)/python -m build --wheel

venv: $(VENV)/.runtime  ## the program and what it needs to run
dev: $(VENV)/.dev       ## and all extras, tests and linters

# A stamp is written when an installation is complete: one that was interrupted is taken up again.
$(VENV)/.runtime: pyproject.toml $(CONSTRAINTS) heads/smollm2-135m/pyproject.toml
	@command -v $(PYTHON) > /dev/null || \
		{ echo "error: there is no $(PYTHON): install Python 3.11 or newer, or name one: make PYTHON=…" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: paceline needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) -V): name another: make PYTHON=…" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -e . -e ./heads/smollm2-135m
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(PIP_INSTALL) -e ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) build dist heads/*/build heads/*/dist
	rm -rf .pytest_cache .coverage .ruff_cache .mypy_cache .import_linter_cache .hypothesis
