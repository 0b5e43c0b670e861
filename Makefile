# The two commands: `make demo` and `make test`. Both set up a .venv the first time.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
export OMP_NUM_THREADS ?= 1

.PHONY: setup frameworks demo test check format bench results docs clean

setup: $(STAMP)

# editable_mode=compat: a plain path; setuptools' import hook would cost every interpreter's start 10 ms.
$(STAMP): requirements-dev.txt pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "torch_bps needs Python 3.10 or newer: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --config-settings editable_mode=compat -e .
	touch $@

# Hugging Face accelerate and PyTorch Lightning: without them their tests are skipped.
frameworks: setup
	$(BIN)/python -m pip install --quiet -r requirements-frameworks.txt

demo: setup
	$(BIN)/python examples/demo.py

# Tests that start several processes run one at a time, beside the others (tests/conftest.py).
test: setup
	$(BIN)/python -m pytest -n 2 --dist loadgroup $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/python benchmarks/startup.py
	$(BIN)/byteps bench all_reduce $(ARGS)

# All benchmarks, half an hour; ARGS=--quick: minutes. Tables, and plots where matplotlib is, in benchmarks/results.
results: setup
	$(BIN)/python benchmarks/report.py $(ARGS)

docs: setup
	$(BIN)/python -m torch_bps.config > $(VENV)/settings.md
	mv $(VENV)/settings.md docs/settings.md

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
