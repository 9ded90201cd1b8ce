# Every target creates what it needs on first use and works without a network afterwards.
#
#   make demo         watch a real model write several parts of its answer at once
#   make test         all tests
#   make coverage     all tests again, and how much of the package they run
#   make docs         the documentation as a website, in _proc/_site
#   make notebooks    run all notebooks in order and save their outputs
#   make export       notebooks -> pasta_lib/, README.md, the sidebar
#   make check        is everything that is generated up to date, and are the notebooks clean?
#   make clean        remove what is generated and not committed (make distclean: .venv too)
#
# Variables: PYTHON=python3.12 (any Python from 3.11 on), VENV=.venv,
#   TORCH_INDEX=URL     take torch from this index: on Linux without a GPU, PyTorch's CPU wheel index saves several GB;
#                       give it on the first call, before .venv exists
#   ARGS="-k masks -x"  given to pytest
#   WORKERS=2           processes that the tests are spread over; each takes up to 3 GB
PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
ARGS ?=
WORKERS ?= 2

py := $(VENV)/bin/python
pip := $(py) -m pip install -qq --no-compile --disable-pip-version-check -c constraints.txt
metadata := setup.py settings.ini constraints.txt

# Packages are installed uncompiled, so whoever first imports a module must be allowed to write down what it compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test coverage docs notebooks export check clean distclean env-demo env
.DEFAULT_GOAL := demo

# Three stamps in one environment: empty, able to run the demo, able to develop.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo \
	  "pasta_lib needs Python 3.11 or later, and '$(PYTHON)' is not: make PYTHON=python3.12 (or wherever yours is)" >&2; exit 1; }
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.torch: $(VENV)/.made
	@if [ -z "$(TORCH_INDEX)" ] && [ "$$(uname -s)" = Linux ] && ! command -v nvidia-smi > /dev/null; then \
	  echo "note: no NVIDIA driver here; if pip now fetches gigabytes of CUDA, start over with TORCH_INDEX (see Makefile)"; fi
	$(if $(TORCH_INDEX),$(pip) --no-deps --index-url $(TORCH_INDEX) torch)
	@$(pip) setuptools
	@touch $@

$(VENV)/.demo: $(VENV)/.torch $(metadata)
	@echo "installing what the demo needs (a few minutes the first time)"
	@$(pip) --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.torch $(metadata)
	@echo "installing what development needs (a few minutes the first time)"
	@$(pip) --no-build-isolation -e '.[all]'
	@touch $(VENV)/.demo $@

env-demo: $(VENV)/.demo
env: $(VENV)/.dev

demo: env-demo
	@$(VENV)/bin/pasta demo

test: env
	$(py) -m pytest $(if $(ARGS),$(ARGS),-n $(WORKERS) --dist worksteal)

# Measuring makes all Python several times slower, so it has a target of its own.
coverage: env
	$(py) -m pytest -n $(WORKERS) --dist worksteal --cov=pasta_lib --cov-report=term --cov-fail-under=90 $(ARGS)

docs: env
	$(py) tools/docs.py

notebooks: env
	$(py) tools/notebooks.py run $(NB)

export: env
	$(py) tools/notebooks.py export

check: env
	$(py) tools/notebooks.py export --check
	$(py) tools/notebooks.py check

clean:
	rm -rf _proc _docs build dist demo *.egg-info .pytest_cache .hypothesis .coverage htmlcov
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
