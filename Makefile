# Every command sets itself up first: a virtual environment in .venv with the versions of constraints.txt.
# Another Python than python3: make PYTHON=python3.12 demo

PYTHON ?= python3
CHOSEN := $(if $(filter file,$(origin PYTHON)),,--chosen)
BIN := .venv/bin
# More arguments for pytest: make unit ARGS='-k scheduler -x'
ARGS ?=
# How many tests run at once, of those that may.
JOBS ?= 2
CHOSEN_TESTS := not drill and not gpu and not multigpu
# Of what ARGS chooses, there may be none in one of the two.
NONE_IS_FINE := $(if $(ARGS),|| [ $$? -eq 5 ])
# Where the generated modules go: make proto OUT=elsewhere
OUT ?= .
# Set-up leaves compiling to the first import; where nothing compiled is kept, every process compiles torch anew.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup demo test browser lint types imports docs unit property integration drills gpu format serve-docs constraints proto clean

help: ## Say what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' Makefile

setup: ## Make or refresh the virtual environment
	@command -v $(PYTHON) >/dev/null || { echo "penstock: There is no '$(PYTHON)' here: install Python 3.11 or newer, or name one with PYTHON=its-path." >&2; exit 1; }
	@$(PYTHON) bootstrap.py $(CHOSEN)

demo: setup ## Train, bundle, serve and measure the digits network; then keep serving its page
	@$(BIN)/python -m penstock.bench.demo

test: setup browser lint types imports docs ## Run every check and every test
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist loadfile -m "$(CHOSEN_TESTS) and not alone" $(ARGS) $(NONE_IS_FINE)
	$(BIN)/pytest -m "$(CHOSEN_TESTS) and alone" $(ARGS) $(NONE_IS_FINE)

browser: setup
	@$(BIN)/python bootstrap.py browser

lint: setup ## Check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup ## Check the types
	$(BIN)/pyright

imports: setup ## Check that imports point one way
	$(BIN)/lint-imports

docs: setup ## Build the documentation, strictly, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

unit property integration: setup ## Run one kind of test: make unit, make property, make integration
	$(BIN)/pytest tests/$@ $(ARGS)

drills: setup ## Run the long drills of killed and hanging processes
	$(BIN)/pytest tests/integration -m drill $(ARGS)

gpu: setup ## Run the tests that need a CUDA GPU
	$(BIN)/pytest tests -m gpu $(ARGS)

format: setup ## Format the code and mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

serve-docs: setup ## Serve the documentation while it is written
	$(BIN)/mkdocs serve

constraints: setup ## Write constraints.txt from what .venv holds now
	@{ sed '/^[^#]/,$$d' constraints.txt; $(BIN)/pip freeze --all --exclude-editable | sed 's/+.*//'; } > constraints.new
	@mv constraints.new constraints.txt

# The messages get a descriptor pool of their own: the same names may be in the process already, from another package.
proto: setup ## Generate the gRPC messages from their .proto
	@mkdir -p $(OUT)
	$(BIN)/python -m grpc_tools.protoc --proto_path=. --python_out=$(OUT) --pyi_out=$(OUT) penstock/serve/protocols/grpc_v2.proto
	sed -i 's/_descriptor_pool.Default()/_descriptor_pool.DescriptorPool()/' $(OUT)/penstock/serve/protocols/grpc_v2_pb2.py

clean: ## Remove the environment, caches, runs and built documentation
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis .import_linter_cache site build dist runs *.egg-info
