# Two commands on a fresh clone: `make demo` and `make test`. Both set up .venv on first use.

VENV ?= .venv
BIN := $(VENV)/bin
# The first Python of at least 3.11 that is installed; override with PYTHON=...
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# One thread per worker: with two workers on two cores, more torch threads would only compete. A file stays on one worker:
# launches that its tests share run once. In order of names, the last files are short, so both workers end together. Compiled
# files are written whatever the environment says: without them, every run rewrites the assertions of a thousand modules.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# The tests of the kernels, and those of their callers again with the kernels: Triton interprets them on the CPU.
INTERPRETED = tests/optim/test_fused.py tests/optim/test_lean.py tests/kernels/test_gradstats.py tests/kernels/test_exponents.py tests/kernels/test_cross_entropy.py tests/engine/test_promises.py tests/watching/test_kernel.py tests/kernels/test_ranges.py tests/kernels/signs/test_signs.py

# The tree and the packages that `make test` has passed on: on the same ones `make test-all` runs the slow tests only.
STATE = $$({ git rev-parse HEAD && git diff HEAD && git ls-files -o --exclude-standard -z | xargs -0 -r cat && \
	$(BIN)/python -m pip freeze --disable-pip-version-check || date +%s%N; } 2>/dev/null | sha256sum)

.PHONY: demo test test-all docs coverage lint type format check clean

# One thread: with 26 thousand parameters a second one only adds synchronization.
demo: $(VENV)/.base  ## the main job on this machine
	$(BIN)/halfstep probe
	OMP_NUM_THREADS=1 $(BIN)/halfstep compare digits --out runs/demo-$$(date +%Y%m%d-%H%M%S)

# COV=1 measures coverage, which takes half as long again, and requires 90 %; CI does.
test: $(VENV)/.dev  ## all tests except the slow ones
	$(PYTEST) -m "not slow" $(if $(COV),--cov --cov-report= --cov-fail-under=90)
	TRITON_INTERPRET=1 $(PYTEST) -m "not slow" $(INTERPRETED)
	@echo "$(STATE)" > $(VENV)/.tested

test-all: $(VENV)/.all  ## every test
	@test "$$(cat $(VENV)/.tested 2>/dev/null)" = "$(STATE)" || $(MAKE) test
	$(PYTEST) -m slow
	TRITON_INTERPRET=1 $(PYTEST) -m slow $(INTERPRETED)

# Needs no torch and no network; a broken link or a public name without a page is an error.
docs: $(VENV)/.docs  ## the documentation as a site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html; to search it: $(BIN)/python -m http.server --directory build/site"

coverage: $(VENV)/.dev  ## the lines that the last `make test COV=1` did not run
	$(BIN)/coverage report

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(VENV)/.dev
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: lint type test

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage*

# Stamps: a second call installs nothing unless the dependencies have changed.
$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "Halfstep needs Python 3.11 or later, which is not installed. Set PYTHON=/path/to/python3."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP_INSTALL) -e ".[torch]"
	@touch $@

$(VENV)/.all: $(VENV)/.dev
	$(PIP_INSTALL) -e ".[torch,dev,deepspeed,transformers,tensorboard,wandb,mlflow,trackio,mcp]" pillow webdataset accelerate lightning trl flake8
	@touch $@

$(VENV)/.docs: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP_INSTALL) -e ".[docs]"
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP_INSTALL) -e ".[torch,dev]"
	@touch $@
