# make test    set up .venv on the first call, then run the tests
# make demo    the same set-up, then the demo; make demo-ranks: two processes train it together
# make check   lint, types and tests: what CI runs
# make audit   looks for known vulnerabilities in what is installed
# make published  what twine says of sdist and wheel, and pyright of code that uses the package
# make tried   trains with TRL, torchtune, torchtitan, bitsandbytes and trackers, in an environment of its own
# make lowest  unit tests with the lowest versions of all that is needed
# make long    every test, the long ones too, with more hypothesis examples
# make stub-card  the CUDA runtime on a card of threads, with a CUDA build of torch (several GB); TORCH=2.11.0: of that one
# make golden  write all golden texts again: then read the git diff
# make docs    build the documentation in build/site; any warning, as for a broken link, is an error
# make results write the tables and figures of the documentation from bench/results

PYTHON ?= python3
TORCH ?= 2.13.0
# On Linux pip may bring torch with several GB of CUDA libraries. On a machine without a GPU set TORCH_INDEX
# to the address of PyTorch's CPU wheel index, which PyTorch's install page gives; pip then takes the small build.
TORCH_INDEX ?=
VENV ?= .venv

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-torch-$(TORCH)

# Otherwise each worker and process of the tests compiles the package and its tests again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: published tried test long golden stub-card demo demo-ranks docs results lint types audit lowest check install clean

# Files of tests are shared out over the cores, and two processes more: a third of the time a worker waits.
WORKERS ?= $(shell expr `getconf _NPROCESSORS_ONLN` + 2)
test: install
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --durations 50

long: install
	$(BIN)/pytest -n $(WORKERS) --dist loadfile -m "long or not long" --hypothesis-profile=long

# No TORCH_INDEX here: the build with CUDA is wanted.
stub-card:
	$(MAKE) install VENV=build/cuda TORCH_INDEX=
	build/cuda/bin/python -m pytest -p tests.stub_card.plugin tests/stub_card -m long

# Texts of tests/golden, and the outputs on two pages of the documentation.
golden: install
	$(BIN)/pytest -q --update-golden -k "golden or program_text or twenty_minutes"

demo: install
	$(BIN)/cotrain-compile demo

demo-ranks: install
	$(BIN)/torchrun --standalone --nproc-per-node 2 --no-python $(BIN)/cotrain-compile demo

# Material's notice about MkDocs 2 is not for readers of a build.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Tables and figures of the documentation, from the JSONs of the benchmarks.
results: install
	$(BIN)/python -m bench.results_page.compare --write

lint: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

audit: install
	$(BIN)/pip-audit --skip-editable

lowest: install
	.ci/lowest $(BIN)/python $(TORCH) $(TORCH_INDEX)

tried: install
	.ci/tried $(BIN)/python $(TORCH) $(TORCH_INDEX)

published: install
	$(BIN)/python -m pip install --quiet -e ".[release]"
	.ci/published $(BIN)/python

# Two workers, as in CI: with one, mypy 2.4 infers some lambdas otherwise.
types: install
	MYPY_NUM_WORKERS=2 $(BIN)/mypy

check: lint types test

install: $(STAMP)

# The stamp carries the torch version, so another TORCH installs again; so does a changed pyproject.toml.
# Pip would compile 14,000 modules to bytecode on one core; a few are templates, which do not compile. Of models of
# transformers and of the packages' own tests, more than a quarter, hardly any is imported.
$(STAMP): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --no-compile "torch==$(TORCH)" $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
	$(BIN)/python -m pip install --no-compile -e ".[dev]"
	$(BIN)/python -m compileall -qq -j 0 -x '/transformers/models/|/tests/' $(VENV)/lib || true
	rm -f $(VENV)/.installed-torch-*
	touch $@

# A half-made environment is removed: venv leaves bin/python behind when pip cannot be put in.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is missing or older than Python 3.11; name another: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; \
	  exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "No virtual environment: on Debian and Ubuntu, 'apt install python3-venv' and run make again." >&2; \
	  exit 1; }

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
