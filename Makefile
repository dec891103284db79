# Two commands on a fresh machine: `make demo` and `make test`. Both make .venv first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# for two cores: one waits while the others work; WORKERS=0 for all in one process, as -s and a debugger want it
WORKERS ?= 3
SPREAD := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# a vLLM for CPUs and an sglang, with all that they need and nothing of $(VENV)
VLLM := build/vllm
VLLM_VERSION := 0.32.0

TOOLS := $(addprefix tests/,tools bench demo deploy docs doctor examples release) \
	$(addprefix tests/integration/,test_admin.py test_admin_page.py test_top.py)

# without mkdocs-material's advertisement of its successor
SITE := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs

.PHONY: house demo serve test check unit tools fuzz simulate network loops rows cancel faults soak engines format docs docs-serve
.PHONY: mutants pages clean schema drawings licences

demo: $(STAMP)
	$(BIN)/kvxfer demo $(ARGS)

# a prefill server, a decode server and a router; ARGS="--help" lists what can be chosen
serve: $(STAMP)
	$(BIN)/python -m examples.serving $(ARGS)

test: check unit

# the core and the integrations
unit: $(STAMP)
	$(SPREAD) $(addprefix --ignore=,$(TOOLS) tests/engines) $(ARGS)

# tools, documents, examples, deployment and release
tools: $(STAMP)
	$(SPREAD) $(TOOLS) $(ARGS)

# forty times the schedules of `make test`, the mover's machine against its model, also with its bounds checked, and more
# plans of the planner and of the interpreted kernel; SEED=1234 replays that one schedule, and says what was done in it
simulate: $(STAMP)
	SIMULATE_TIMES=40 $(if $(SEED),SIMULATE_SEED=$(SEED)) $(SPREAD) tests/simulation \
		$(if $(SEED),-n 0 -k test_schedules -s) $(ARGS)
	$(if $(SEED),,WORLDS=300 $(SPREAD) tests/geometry/test_plan.py tests/geometry/test_conversion.py)
	$(if $(SEED),,MACHINE_STEPS=1000000 KERNEL=all $(SPREAD) tests/copy/test_model.py tests/copy/test_kernel.py)
	$(if $(SEED),,NUMBA_BOUNDSCHECK=1 MACHINE_STEPS=100000 $(SPREAD) tests/copy/test_model.py)

# every scene on every route; `make test` plays a part of them
network: $(STAMP)
	NETWORK_SCENES=all $(SPREAD) tests/network $(ARGS)

# every scene on asyncio's loop and on uvloop's; `make test` plays most cases on one of them
loops: $(STAMP)
	LOOPS=all $(SPREAD) tests/integration $(ARGS)

# every pair of engines in two processes over NIXL, and layer by layer; `make test` plays a third of them
rows: $(STAMP)
	ROWS=all $(SPREAD) tests/rows $(ARGS)

cancel: $(STAMP)
	CANCELLATIONS=all $(SPREAD) tests/integration/test_cancel_awaits.py --timeout=1800 $(ARGS)

# every fault at every step on every route, and stalls of ten seconds; `make unit` takes 24 of them
faults: $(STAMP) network
	FAULTS=all $(SPREAD) tests/faults $(ARGS)

# ARGS="10000 --json soak.json" for fewer, and for figures
soak: $(STAMP)
	$(BIN)/python tests/faults/soak.py $(ARGS)

# real engines hand requests over, on CPUs; ARGS=--full for every configuration, model and fault
engines: $(VLLM)/.installed
	PYTHONDONTWRITEBYTECODE= $(VLLM)/bin/python -m pytest tests/engines $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/basedpyright
	$(SITE) build --strict

# how large it is, beside the goals
house: $(STAMP)
	PYTHONPATH=tests/house $(BIN)/python tests/house/sizes.py

# half an hour: which of 60 small changes of the code do tests see? ARGS="--seed 2" draws others; ARGS="--tests COMMIT"
# asks tests as they were then
mutants: $(STAMP)
	$(BIN)/python tests/house/mutants.py $(ARGS)

# the full count, of which `make test` plays a part
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
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test,examples,admin,otel,docs]"
	touch $@

# all pins and no dependencies, of which vLLM's and sglang's would bring builds for GPUs; what is imported is compiled
# then, which is a small part; vLLM's command asks for a package `vllm`
$(VLLM)/.installed: tests/engines/constraints.txt pyproject.toml
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@echo "installing into $(VLLM): this takes some minutes"
	$(VLLM)/bin/python -m pip install --quiet --no-deps --no-compile --requirement tests/engines/constraints.txt
	$(VLLM)/bin/python -m pip install --quiet --no-deps --editable .
	cd $(VLLM)/lib/python*/site-packages && mkdir -p vllm-$(VLLM_VERSION)+cpu.dist-info && printf \
		'Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM_VERSION)+cpu\n' > vllm-$(VLLM_VERSION)+cpu.dist-info/METADATA
	touch $@

clean:
	rm -rf $(VENV) $(VLLM) .mypy_cache .pytest_cache .ruff_cache .hypothesis
