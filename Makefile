# Two commands on a fresh machine: `make demo` and `make test`. Both make .venv first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# for two cores: one waits while the others work; WORKERS=0 for all in one process, as -s and a debugger want it
WORKERS ?= 3
SPREAD := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# without mkdocs-material's advertisement of its successor
SITE := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs

.PHONY: house demo serve test check unit fuzz simulate network cancel faults soak format docs docs-serve pages clean
.PHONY: schema drawings licences

demo: $(STAMP)
	$(BIN)/kvxfer demo $(ARGS)

# a prefill server, a decode server and a router; ARGS="--help" lists what can be chosen
serve: $(STAMP)
	$(BIN)/python -m examples.serving $(ARGS)

test: check unit

unit: $(STAMP)
	$(SPREAD) $(ARGS)

# ten times the schedules of `make test`, and the mover's machine against its model, also with its bounds checked;
# SEED=1234 replays that one of each, and says what was done in it
simulate: $(STAMP)
	SIMULATE_TIMES=10 $(if $(SEED),SIMULATE_SEED=$(SEED)) $(SPREAD) tests/simulation \
		$(if $(SEED),-n 0 -k test_schedules -s) $(ARGS)
	$(if $(SEED),,MACHINE_STEPS=1000000 $(SPREAD) tests/copy/test_model.py)
	$(if $(SEED),,NUMBA_BOUNDSCHECK=1 MACHINE_STEPS=100000 $(SPREAD) tests/copy/test_model.py)

# every scene on every route; `make test` plays a part of them
network: $(STAMP)
	NETWORK_SCENES=all $(SPREAD) tests/network $(ARGS)

cancel: $(STAMP)
	CANCELLATIONS=all $(SPREAD) tests/integration/test_cancel_awaits.py --timeout=1800 $(ARGS)

# every fault at every step on every route, and stalls of ten seconds; `make unit` takes 40 of them
faults: $(STAMP) network
	FAULTS=all $(SPREAD) tests/faults $(ARGS)

# ARGS="10000 --json soak.json" for fewer, and for figures
soak: $(STAMP)
	$(BIN)/python tests/faults/soak.py $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/basedpyright
	$(SITE) build --strict

# how large it is, beside the goals
house: $(STAMP)
	PYTHONPATH=tests/house $(BIN)/python tests/house/sizes.py

# the full count of what `make test` plays a tenth of
fuzz: $(STAMP)
	FUZZ_FRAMES=1000000 $(BIN)/python -m pytest tests/fuzz -s --timeout=3600 $(ARGS)

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# generated files: each has a test that fails when it is stale
schema: $(STAMP)
	$(BIN)/python -m proto.generate

drawings: $(STAMP)
	$(BIN)/python docs/generate_drawings.py

licences: $(STAMP)
	$(BIN)/python docs/generate_licences.py

pages: drawings licences

# the documentation as a site, in build/site; strict, so a broken link or a page that no menu has is an error
docs: $(STAMP)
	$(SITE) build --strict

docs-serve: $(STAMP)
	$(SITE) serve $(ARGS)

# installed again only when the pins or the package's metadata change
$(STAMP): constraints.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): this takes some minutes"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test,examples,bench,admin,otel,ray,docs]"
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
