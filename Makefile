PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
DATA ?= data
PEERS ?= $(BIN)/python

.PHONY: help install demo test lint bench bench-map bench-embed bench-demo clean

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

bench: install  ## all benchmarks, one after the other; DATA=folder PEERS=python that has them
	$(MAKE) -j1 bench-map bench-embed bench-demo

bench-map: install    ## lake to map beside umap-learn and openTSNE
	$(BIN)/python -m benchmarks.lake_to_map --data $(DATA) --peers-python $(PEERS)

bench-embed: install  ## the embed stage against the bare forward pass
	$(BIN)/python -m benchmarks.embed_rate

bench-demo: install   ## the demo's seconds and accuracy
	$(BIN)/python -m benchmarks.demo

clean:          ## remove the environment, caches and the demo
	rm -rf $(VENV) demo build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
