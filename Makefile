# `make demo` and `make test` need Python 3.11 or newer and make; they set up everything else themselves: the demo the
# libraries of the programs, the tests and linters those of development, too. uv installs them, if it is on the path.

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
# Installed before everything else, so that the build chosen here stays. For a card, give pip's words for the wheel
# of its CUDA: make venv TORCH="torch==2.13.0 --index-url ADDRESS", with the address that pytorch.org names for it.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PROGRAMS := $(VENV)/.programs
STAMP := $(VENV)/.installed
EXTRAS := media,encode,train,report,ui,demo
UV := $(shell command -v uv)
ANY_UV := $(or $(UV),$(BIN)/uv)
# Files are compiled when they are first imported: most of them never are.
INSTALL := $(if $(UV),$(UV) pip install --python $(BIN)/python,$(BIN)/python -m pip install --no-compile)
FLAVOUR ?=
PYTEST_ARGS ?=
PART ?= 0/1
PINS_HEADER := \# The versions that were tested together, on Python 3.11, 3.12 and 3.13; written by make constraints.
# Without a virtual environment a Python that has torch already, such as that of a rented machine.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
ONLY ?=
MINUTES ?=
RESULTS ?=
UPGRADE ?=
VERSION ?=
# Container images often set it; each of the tests' processes would then compile the same files again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help venv test test-fast test-long golden lint generated docs screenshots constraints outdated wheel release-notes gpu demo clean

help:
	@echo "make demo [FLAVOUR=...]   the whole pipeline on real photographs with a tiny model; FLAVOUR=all: all of them"
	@echo "make test                 the tests that prove every change (PYTEST_ARGS=... are added)"
	@echo "make test-fast            the same without those marked slow, for every change on the way"
	@echo "make test-long [PART=i/n] torture, browser, benchmarks, every kill and every product of options; of n parts"
	@echo "                          the ith, from 0"
	@echo "make gpu [ONLY=part,part] what needs a GPU: tests and benchmarks, in 10 minutes, with the torch that is there"
	@echo "make golden               record tests/golden.json and tests/messages.txt, after a change of a format or of words"
	@echo "make lint                 ruff, mypy and the import contracts"
	@echo "make generated            pipeline.schema.json, pipeline.yaml, docs/options.md, docs/programs.md, keys in docs/coming-from.md,"
	@echo "                          schemas/cli/command_lines.json"
	@echo "make docs                 the documents as a site, in site/"
	@echo "make screenshots          docs/images/page-*.jpg: the page of latentpress ui in five states; needs Chromium"
	@echo "make constraints [UPGRADE=all|\"name name\"]  constraints.txt of pyproject.toml: pins that are there stay, others"
	@echo "                          are added; UPGRADE takes the newest of all, or of these"
	@echo "make outdated             which packages of $(VENV) are behind, and by how much"
	@echo "make wheel                dist/: the wheel, built from the source distribution beside it"
	@echo "make release-notes VERSION=...  what CHANGELOG.md has of a version"
	@echo "make venv [TORCH=...]     only the virtual environment, in $(VENV), with what the programs and the demo need"
	@echo "make clean                remove caches and what the demo made; $(VENV) stays"

venv: $(PROGRAMS)

$(PROGRAMS): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer was found; install one, or: make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) $(TORCH)
	$(INSTALL) --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@

$(STAMP): $(PROGRAMS)
	$(INSTALL) --constraint constraints.txt --editable '.[$(EXTRAS),dev]'
	@touch $@

test: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist worksteal $(PYTEST_ARGS)

test-fast: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow and not long" $(PYTEST_ARGS)

test-long: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist worksteal -m "long or hypothesis" --hypothesis-profile long --part $(PART) \
		--timeout 3600 $(PYTEST_ARGS)

golden: $(STAMP)
	GOLDEN=record $(BIN)/python -m pytest -m "long or not long" tests/test_golden.py tests/test_golden_models.py \
		tests/test_messages.py

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

generated: $(STAMP)
	$(BIN)/python -m schemas.config.generated
	$(BIN)/python docs/generated.py

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

screenshots: $(STAMP)
	$(BIN)/python -m docs.screenshots

# For every Python and system at once. torch's own pins of CUDA's libraries are left out: each of its builds has others.
# Not $(STAMP): it could not be made where a pin is older than what pyproject.toml asks for.
constraints: | $(ANY_UV)
	echo "$(firstword $(TORCH))" | $(ANY_UV) pip compile --quiet --no-header --no-annotate --universal --python-version 3.11 \
		--fork-strategy fewest --all-extras $(if $(filter all,$(UPGRADE)),--upgrade,$(UPGRADE:%=--upgrade-package %)) \
		--output-file constraints.txt - pyproject.toml
	@{ echo "$(PINS_HEADER)"; grep -vE '^(cuda|nvidia|triton)\b' constraints.txt; } >constraints.new
	@mv constraints.new constraints.txt

wheel: | $(ANY_UV)
	$(ANY_UV) build --out-dir dist

release-notes:
	@awk -v version="$(VERSION)" '/^## /{inside = index($$0, "## [" version "]") == 1} inside{print; found = 1} \
		END{if (!found) {print "CHANGELOG.md has no version " version >"/dev/stderr"; exit 1}}' CHANGELOG.md

$(BIN)/uv:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --constraint constraints.txt uv

outdated: $(STAMP) | $(ANY_UV)
	$(ANY_UV) pip list --outdated --python $(BIN)/python

gpu:
	$(GPU_PYTHON) -m benchmarks.gpu $(if $(ONLY),--only $(ONLY)) $(if $(MINUTES),--minutes $(MINUTES)) \
		$(if $(RESULTS),--results $(RESULTS))

demo: $(PROGRAMS)
	$(if $(filter data all,$(FLAVOUR)),$(INSTALL) --constraint constraints.txt --editable '.[features]')
	$(BIN)/python -m examples.demo $(FLAVOUR)

clean:
	rm -rf demo dist site .tiny .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build *.egg-info
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
