# Everything runs in .venv, which the first target that needs it makes.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Without an NVIDIA GPU the tests of the real backend need this build of torch; with one, any.
TORCH  ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo torch || echo torch==2.13.0)

.PHONY: demo test fast lint format bench golden notebooks clean

demo: $(VENV)/installed          ## install, then run the quick start
	$(BIN)/schedlab run experiments/quickstart.yaml -o runs/quickstart
	@echo "figure: runs/quickstart/throughput_p99.png"

test: $(VENV)/tested             ## install what tests need, then run them all
	$(BIN)/python -m pytest $(ARGS)

fast: $(VENV)/tested             ## tests that take less than a few seconds
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

lint: $(VENV)/tested             ## what must be clean before a commit
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/tested           ## put code into its one format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/installed         ## CPU seconds of the simulator; prints a table and JSON
	$(BIN)/python -m schedlab.experiments.bench.bench $(ARGS)

golden: $(VENV)/tested           ## accept the present results as the expected ones
	$(BIN)/python -m tests.golden.regenerate

notebooks: $(VENV)/tested        ## write each notebook anew from its .py, without outputs
	$(BIN)/jupytext --to ipynb --update notebooks/*.py

clean:                           ## remove what was built and measured here
	rm -rf $(VENV) runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "schedlab needs Python 3.11 or newer; set PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/tested: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check '$(TORCH)'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,gpu,predictors]'
	@touch $@ $(VENV)/installed
