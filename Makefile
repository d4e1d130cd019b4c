# the command line of every target runs in .venv, made on first use
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TESTFLAGS ?= -n 2 --dist worksteal

.PHONY: demo test check bench nightly clean

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

demo: $(VENV)/.ready
	$(BIN)/reshard demo --out demo-out

test: $(VENV)/.ready
	$(BIN)/python -m pytest -q $(TESTFLAGS)

check: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.ready
	$(BIN)/python -m benchmarks

nightly: $(VENV)/.ready
	$(BIN)/python -m pytest -q property_tests --hypothesis-profile=nightly

clean:
	rm -rf $(VENV) demo-out bench-out build dist *.egg-info
