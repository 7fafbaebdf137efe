# Two commands on a fresh machine: `make serve` and `make test`. Both set up `.venv` first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.runtime
DOCS_VENV := .venv-docs
READY := $(VENV)/.ready
PIP := $(BIN)/pip --disable-pip-version-check
NO_COMPILE := $(if $(PYTHONDONTWRITEBYTECODE),,--no-compile)
# The CPU threads of tests: several processes with many threads each fight. Tests start hundreds of processes: none
# compiles Weft's modules again, even where the environment keeps Python from writing what it has compiled.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=

.PHONY: serve test quick setup ops lint types types-tests imports unit test-slow test-transformers test-levels test-arm test-grid test-ray test-nixl test-clients soak test-gpu simulate bench bench-peers wheel docs clean help

# The server answers before the C++ operations are compiled, and changes to them when they are. Compiled Python modules
# are kept, even where the environment forbids it: without them every start takes a second more. By `exec` the server
# takes the place of the shell, so the server gets the signal that ends make.
serve: $(RUNTIME)  ## serve the bundled model on http://127.0.0.1:8000; ARGS="MODEL --port 8001" for another
	exec env PYTHONDONTWRITEBYTECODE= $(BIN)/weft serve --build-ops $(ARGS)

# Two at a time: the tests, and beside the first ones the others by turn, whose words stand among the dots.
test: setup ops  ## lint, types, import contracts and the default tests
	$(MAKE) -j 2 unit lint types imports

# What starts no server and no ranks: most of the code, in a fraction of the time.
QUICK := common types config kv scheduler control/fleet text sampling layers attention moe speculation runner sim testing docs \
	e0/test_grid.py e0/test_states.py front/test_completions.py front/test_chat.py front/test_http.py

quick: lint imports setup ops  ## lint, import contracts and the tests that start few processes, in under 4 minutes
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(addprefix tests/,$(QUICK)) $(ARGS)

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/'

setup: $(READY)  ## make .venv with pinned dependencies, those of tests included

# What the server needs: half of what the tests need. pip would compile 7,000 Python modules, for 25 s of a core. The
# server imports a quarter of them, and compiles those at its first start. Where the environment forbids Python to write
# compiled modules, every start would compile them: there, pip compiles all.
$(RUNTIME): pyproject.toml requirements/runtime.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v >= (3, 11) else "Weft needs Python 3.11 or 3.12, this is %d.%d: make PYTHON=python3.12 ..." % v)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the pinned dependencies into $(VENV): about 1 GB the first time, most of it torch"
	@bash scripts/install_torch.sh $(BIN)/python $(NO_COMPILE)
	$(PIP) install $(NO_COMPILE) -r requirements/runtime.txt
	$(PIP) install $(NO_COMPILE) --quiet --no-deps --no-build-isolation --editable .
	@echo "installed$(if $(NO_COMPILE),; the first start takes some seconds longer than the later ones)"
	touch $(RUNTIME)

$(READY): $(RUNTIME) requirements/lock.txt
	@echo "installing what the tests need besides"
	$(PIP) install --quiet -r requirements/lock.txt
	touch $(READY)

# Asks each time: what is built lies in the user's cache, not in .venv. Without a compiler everything runs on torch's
# operations, slower.
ops: $(RUNTIME)  ## compile the C++ operations for this CPU, unless they are compiled
	@$(BIN)/weft build-ops || echo "going on without the C++ operations"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/prose.py

types: setup
	$(BIN)/mypy

types-tests: setup  ## check the calls in tests and benches
	$(BIN)/mypy -p tests -p bench -p training

imports: setup
	$(BIN)/lint-imports

# Three processes for two cores: a quarter of the time one of them waits.
unit: setup ops
	$(TEST_ENV) $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

test-slow: setup ops  ## the tests that are exhaustive or long, which the default tests leave out
	$(TEST_ENV) $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m slow $(ARGS)

test-levels: setup ops  ## the kernel tests on every lower level of CPUs that this machine executes; ARGS="avx2 -- tests" for all tests on one
	$(TEST_ENV) $(BIN)/python scripts/test_levels.py $(ARGS)

test-arm: setup  ## the kernels for AArch64, cross-compiled and run by qemu-user (apt-get install g++-aarch64-linux-gnu qemu-user)
	$(TEST_ENV) $(BIN)/python -m pytest -n 0 -m slow tests/ops/test_neon.py $(ARGS)

test-transformers: setup ops  ## every causal class of the installed transformers: served with equal tokens, or refused (docs/reference/transformers.md)
	$(TEST_ENV) $(BIN)/python -m pytest -n 3 --no-loadscope-reorder -m slow tests/models/test_generic.py $(ARGS)

test-grid: setup ops  ## every combination of the E0 and E1 grids (very slow)
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 -m grid $(ARGS)

test-clients: setup ops  ## the tests with clients of requirements/clients.txt, and with agents where npm's are found
	$(PIP) install --quiet -r requirements/clients.txt
	$(TEST_ENV) $(BIN)/python -m pytest -n 1 -m "clients or agents" tests/clients $(ARGS)
	$(TEST_ENV) $(BIN)/python -m pytest -n 0 tests/text/parsing/test_harmony.py

test-nixl: setup ops  ## transfers through NIXL of requirements/nixl.txt, over cma and TCP
	$(PIP) install --quiet --no-deps -r requirements/nixl.txt
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist loadfile -m "not grid" -k "nixl or reads" tests/disagg/transport tests/engine/test_nixl_groups.py $(ARGS)

soak: setup ops  ## 2,000 requests to two groups that prefill and two that decode, which are killed meanwhile
	$(TEST_ENV) $(BIN)/python -m bench.soak --requests 2000 $(ARGS)

test-gpu: setup  ## the tests that need a CUDA GPU
	$(BIN)/python -m pytest -m gpu $(ARGS)

test-ray: setup ops  ## the tests with Ray clusters, which start real nodes
	$(TEST_ENV) $(BIN)/python -m pytest -m "slow or not slow" tests/on_ray $(ARGS)

simulate: setup  ## 10,000 simulated schedules of a cluster with faults; ARGS="--schedules 100000 --jobs 2" for more
	$(BIN)/python -m testing.cluster $(ARGS)

bench-peers:  ## make the environments of the engines that Weft is compared with, outside the repository
	PYTHON=$(PYTHON) bash bench/peers/setup.sh $(ARGS)

bench: setup ops  ## compare Weft with the engines that are set up
	$(BIN)/python -m bench.compare $(ARGS)

wheel: setup ops  ## build the wheel into dist, with the C++ operations of all levels of CPUs, and try it
	bash scripts/wheel.sh $(BIN)/python

$(DOCS_VENV)/.ready: requirements/docs.txt
	test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/pip --disable-pip-version-check install --quiet -r requirements/docs.txt
	touch $(DOCS_VENV)/.ready

# Every broken link or anchor ends the build; with --quiet mkdocs would count no warnings. The build needs no network,
# and the site loads nothing from other hosts.
docs: $(DOCS_VENV)/.ready  ## build the docs as a site, site/index.html; broken links are errors
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build --strict --clean $(ARGS)
	@echo "the site is in site/: open site/index.html"

clean:  ## remove what the targets above made
	rm -rf $(VENV) $(DOCS_VENV) site build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
