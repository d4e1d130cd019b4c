# the command line of every target runs in .venv, made on first use
# the first of these that is new enough
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# another torch has an environment beside it: make test TORCH=2.6.0
VENV := .venv$(addprefix -torch-,$(TORCH))
# --constraint rather than a bound in pyproject.toml: users may have any torch from 2.6 on
PIN := $(if $(TORCH),"torch==$(TORCH)",--constraint constraints.txt)
BIN := $(VENV)/bin
TESTFLAGS ?= -n 2 --dist worksteal

# where there is a C compiler; without it everything works, too
COMPILED = @if command -v cc >/dev/null 2>&1; then $(1) || echo "the compiled kernel was not built: numpy does its work"; fi

MAKE_VENV = @test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: install it, or name it with make PYTHON=..."; exit 1; }; \
	$(PYTHON) -m venv

.PHONY: demo test check docs dist bench gpu nightly clean

KERNELS := $(wildcard kernels/*.py kernels/*.toml kernels/reshard_kernels/*.py kernels/reshard_kernels/*.[ch])

$(VENV)/.ready: pyproject.toml constraints.txt $(KERNELS)
	$(MAKE_VENV) $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIN) -e ".[dev,docs]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps "torchtitan>=0.3"
	$(call COMPILED,$(BIN)/python -m pip install --quiet --disable-pip-version-check ./kernels)
	touch $@

demo: $(VENV)/.ready
	$(BIN)/reshard demo --out demo-out

test: $(VENV)/.ready
	$(BIN)/python -m pytest -q $(TESTFLAGS)

check: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ruff format --check --line-length 96 README.md $$(find docs -name '*.md')
	$(BIN)/mypy
	$(BIN)/mypy tests/typed_calls.py
	$(BIN)/mypy --strict kernels/reshard_kernels

# warnings are errors; the pages are in site/. Without .venv, in an environment without frameworks
DOCS := $(if $(wildcard $(VENV)/.ready),$(VENV),.venv-docs)

.venv-docs/.ready: pyproject.toml constraints.txt
	$(MAKE_VENV) .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check $(PIN) -e ".[docs]"
	touch $@

docs: $(DOCS)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

# the wheel and the sdist, each tried in an environment of its own, away from the repository
# files in wheels have the time of the commit, so that two builds of one commit are the same
dist: export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || date +%s)
dist: $(VENV)/.ready
	rm -rf dist
	$(BIN)/python -m build --quiet
	$(call COMPILED,$(BIN)/python -m build --quiet --outdir dist/kernels kernels)
	.ci/stranger dist

bench: $(VENV)/.ready
	$(BIN)/python -m benchmarks

# says so and ends well where there is no accelerator; make gpu DEVICE=sim walks through it on a simulated one
gpu: $(VENV)/.ready
	$(BIN)/python -m benchmarks.device $(if $(DEVICE),--device=$(DEVICE) --mib=1) --suites

# another seed each night, which is printed; SEED=... for the same damages again
SEED ?= $(shell date +%s)

nightly: $(VENV)/.ready
	$(BIN)/python -m pytest -q property_tests --hypothesis-profile=nightly --timeout=0
	$(BIN)/python -m tests.damage --random 10000 --seed $(SEED)
	$(BIN)/python -m tests.reshard.api.test_engines 20 $(SEED)
	$(BIN)/python -m tests.reshard.integrations.megatron_models
	$(BIN)/python -m tests.reshard.execute.test_work_list 200000 $(SEED)
	$(BIN)/python -m tests.stories.test_killed_runs 60 $(SEED)
	$(BIN)/python -m tests.power 10000 $(SEED)
	$(BIN)/python -m tests.interleaved 100000 $(SEED)
	$(BIN)/python -m tests.interleaved every
	$(BIN)/python -m tests.hosts.frozen 20 $(SEED)
	$(BIN)/python -m tests.hosts.trials 528 $(SEED) --jobs 3
	$(BIN)/python -m tests.hosts.trials 88 $(SEED) --hosts 3 --jobs 3

clean:
	rm -rf .venv .venv-docs .venv-torch-* demo-out bench-out site build dist *.egg-info kernels/build kernels/*.egg-info
