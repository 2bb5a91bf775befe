# Everything here sets itself up: it needs a Python 3.11 or later and nothing else. `make` alone says what there is.
#
#   make PYTHON=/path/to/python3.12 ...   uses that interpreter for a new virtual environment

SHELL := /bin/sh
.DELETE_ON_ERROR:
.NOTPARALLEL:

VENV := .venv
BIN := $(VENV)/bin
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_INPUT=1 $(BIN)/python -m pip -qq
INSTALL_PROJECT := $(PIP) install --no-deps --no-build-isolation --editable .
PROTOS := $(wildcard proto/ringfence/v1/*.proto)
# Extra words for pytest: `make test TESTS="tests/unit -k manifest"`.
TESTS ?=
# So many tests run beside each other: most wait for something, so there are more than processors. 0: none does.
WORKERS ?= $(shell echo $$(($$(nproc) + 1)))

.PHONY: help demo test pytest lint bench proto lock clean

help:
	@echo 'make demo    set up and run the guided demo'
	@echo 'make test    set up, check style, types and layers, and run all tests'
	@echo 'make lint    the checks of `make test` without the tests'
	@echo 'make bench   set up and measure'
	@echo 'make proto   regenerate the stubs from proto/'
	@echo 'make lock    resolve the dependencies anew'
	@echo 'make clean   remove what make made'

demo: $(VENV)/.ready
	@$(BIN)/ringfence demo

test: lint pytest

# First what bears company, then what doesn't (the marker `alone`). No test at all (5) is an error only if neither had one.
pytest: $(VENV)/.ready-dev
	@$(BIN)/python -m pytest -n $(WORKERS) -m 'not alone' $(TESTS); beside=$$?; \
	$(BIN)/python -m pytest -m alone $(TESTS); alone=$$?; \
	case $$beside/$$alone in 0/0 | 0/5 | 5/0) ;; *) exit 1 ;; esac

bench: $(VENV)/.ready-dev
	@$(BIN)/python -m bench

lint: $(VENV)/.ready-dev
	@echo 'ruff, pyright, import-linter, buf'
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/pyright >$(VENV)/.pyright 2>&1 || { cat $(VENV)/.pyright; exit 1; }
	@$(BIN)/lint-imports --no-logo >$(VENV)/.lint-imports 2>&1 || { cat $(VENV)/.lint-imports; exit 1; }
	@$(BIN)/buf lint

proto: $(VENV)/.ready-dev
	@PATH="$$PWD/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I proto \
		--python_out=proto --mypy_out=quiet:proto $(PROTOS)

# uv resolves for every platform at once and takes the hashes of all files; the lock names no index. Releases rest for
# two weeks before they are taken: a bad one is found out by then.
COMPILE := --universal --generate-hashes --python-version 3.11 --no-emit-index-url --no-emit-find-links \
	--no-annotate --no-config --exclude-newer '14 days' --custom-compile-command 'make lock' --quiet pyproject.toml -
lock: $(VENV)/.ready-dev
	@echo 'hatchling>=1.27' | $(BIN)/uv pip compile $(COMPILE) --upgrade --output-file requirements.lock
	@echo 'hatchling>=1.27' | $(BIN)/uv pip compile $(COMPILE) --upgrade --extra dev \
		--constraint requirements.lock --output-file requirements-dev.lock
	@$(BIN)/uv pip compile $(filter-out pyproject.toml -,$(COMPILE)) --no-deps --upgrade \
		--constraint requirements-dev.lock --output-file bench/attacks/requirements.lock bench/attacks/requirements.in
	@$(BIN)/uv pip compile $(filter-out pyproject.toml -,$(COMPILE)) --upgrade \
		--output-file bench/peers/requirements.lock bench/peers/requirements.in
	@$(BIN)/uv pip compile $(filter-out pyproject.toml -,$(COMPILE)) --upgrade \
		--override examples/requirements.without --output-file examples/requirements.lock examples/requirements.in

clean:
	@rm -rf $(VENV) .demo .recipes .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- set-up; each stamp is younger than what it was made from ----

$(VENV)/.made:
	@python='$(PYTHON)'; \
	if [ -z "$$python" ]; then \
		for name in python3 python3.14 python3.13 python3.12 python3.11; do \
			found=$$(command -v $$name 2>/dev/null) || continue; \
			"$$found" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { python=$$found; break; }; \
		done; \
	fi; \
	if [ -z "$$python" ]; then \
		echo 'no Python 3.11 or later on the PATH: install one, or run make PYTHON=/path/to/python3' >&2; exit 1; \
	fi; \
	if ! "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
		echo "\`$$python\` is not a Python 3.11 or later: give another with PYTHON=" >&2; exit 1; \
	fi; \
	if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
		echo "\`$$python\` has no venv: install it (Debian and Ubuntu: apt-get install python3-venv)," \
			'or run make PYTHON=/path/to/another/python3' >&2; exit 1; \
	fi; \
	echo "virtual environment $(VENV) with $$("$$python" --version)"; \
	"$$python" -m venv $(VENV)
	@touch $@

$(VENV)/.ready: requirements.lock pyproject.toml $(VENV)/.made
	@echo 'dependencies (requirements.lock)'
	@$(PIP) install --require-hashes -r requirements.lock
	@$(INSTALL_PROJECT)
	@touch $@

$(VENV)/.ready-dev: requirements-dev.lock bench/attacks/requirements.lock $(VENV)/.ready
	@echo 'development dependencies (requirements-dev.lock, bench/attacks/requirements.lock)'
	@$(PIP) install --require-hashes -r requirements-dev.lock
	@$(PIP) install --require-hashes --no-deps -r bench/attacks/requirements.lock
	@touch $@
