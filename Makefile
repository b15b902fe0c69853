PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
DATA ?= ../shared/data

.PHONY: help install demo test lint bench clean

help:           ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

install: $(INSTALLED)  ## create the virtual environment with everything in it

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt pip setuptools
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[cpu,dev]'
	touch $(INSTALLED)

demo: install   ## make a lake of digits and map it, from nothing to picture and report
	$(BIN)/lakemap demo

lint: install   ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint      ## ruff, mypy and the whole test suite
	$(BIN)/pytest

bench: install  ## all benchmarks; DATA=folder of the data sets
	$(BIN)/python -m benchmarks.spine --data $(DATA)

clean:          ## remove the environment, caches and the demo
	rm -rf $(VENV) demo build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
