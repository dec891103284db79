# Two commands on a fresh machine: `make demo` and `make test`. Both make .venv first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test check unit format schema errors clean

demo: $(STAMP)
	$(BIN)/kvxfer demo $(ARGS)

test: check unit

unit: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/basedpyright

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# generated files: each has a test that fails when it is stale
schema: $(STAMP)
	$(BIN)/python -m proto.generate

errors: $(STAMP)
	$(BIN)/python -m docs.generate_errors

# installed again only when the pins or the package's metadata change
$(STAMP): constraints.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test,examples]"
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
