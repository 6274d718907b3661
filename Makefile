# Every target explains itself: make help
VENV ?= .venv
PYTHON ?= python3
# With a GPU choose your own build: make install TORCH="torch==2.11.0"
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Two OpenMP threads that spin on shared cores collapse; sleeping ones do not.
export OMP_WAIT_POLICY := PASSIVE
export HF_HUB_OFFLINE ?= 1
# Two processes with one thread each; a file of tests shares its fixtures.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## Make a virtual environment in .venv with everything in it

# PyTorch first and alone, so that nothing else chooses its build.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev]"
	touch $(STAMP)

demo: install ## Index Python's own documentation and search it: offline, minutes
	$(BIN)/nci demo -o demo

quick: install ## Tests without the slow ones: under 2 minutes
	$(PYTEST) -m "not slow"

test: install ## All tests: minutes on 2 cores
	$(PYTEST)

lint: install ## Format, style and types
	$(BIN)/ruff format --check nci tests benchmarks
	$(BIN)/ruff check nci tests benchmarks
	$(BIN)/mypy

format: install ## Format the code
	$(BIN)/ruff format nci tests benchmarks
	$(BIN)/ruff check --fix nci tests benchmarks

bench: install ## Measure: tree building, search speed, and quality on the data in NCI_DATA
	$(BIN)/python benchmarks/tree.py --documents 100000 --width 768
	$(BIN)/python benchmarks/search.py
	$(BIN)/python benchmarks/quality.py

clean: ## Remove the environment and build output
	rm -rf $(VENV) demo .mypy_cache .ruff_cache .pytest_cache .hypothesis

.PHONY: help install demo quick test lint format bench clean
