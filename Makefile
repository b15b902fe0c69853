PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
TOOLS ?= .tools
AIRFLOW ?= .venv-airflow
DATA ?= data
PEERS ?= $(BIN)/python
SEEDS ?= 5
TABLES ?= quality earlier study objectives

.PHONY: help install demo week test test-slurm test-deploy test-airflow lint bench bench-map bench-embed bench-scale bench-stores bench-demo bench-drift bench-graph bench-knn \
	bench-scale-graph bench-calibration bench-joint tables clipping clean

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

week: install   ## a week of nightly refreshes of a growing lake, each night checked; one picture per night
	$(BIN)/python -m jobs.week

lint: install   ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint      ## ruff, mypy and the whole test suite
	$(BIN)/pytest

test-slurm: install  ## whole runs through a real SLURM on this host, installed with apt where needed
	tests/slurm/install && $(BIN)/pytest -m slurm tests/slurm || test $$? -eq 77

test-deploy: install   ## deploy/ with the checkers of cron, systemd and Prometheus, got from apt
	tests/deploy/get_tools.sh $(TOOLS)
	PATH="$(CURDIR)/$(TOOLS)/bin:$$PATH" $(BIN)/pytest tests/deploy

test-airflow: install  ## the DAGs run by Airflow itself, in an environment of its own
	@if $(MAKE) $(AIRFLOW)/installed; then \
		LAKEMAP_AIRFLOW="$(CURDIR)/$(AIRFLOW)/bin" $(BIN)/pytest tests/deploy/test_airflow.py; \
	else \
		echo "test-airflow SKIPPED: Airflow cannot be installed here"; \
	fi

$(AIRFLOW)/installed: deploy/airflow/constraints.txt
	$(PYTHON) -m venv $(AIRFLOW)
	timeout 180 $(AIRFLOW)/bin/python -m pip install --quiet --no-compile \
		--constraint $< apache-airflow
	touch $@

bench: install  ## all benchmarks, one after the other; DATA=folder PEERS=python that has them
	$(MAKE) -j1 bench-map bench-embed bench-scale bench-stores bench-demo bench-graph

bench-map: install    ## lake to map beside umap-learn and openTSNE
	$(BIN)/python -m benchmarks.lake_to_map --data $(DATA) --peers-python $(PEERS)

bench-embed: install  ## the embed stage against the bare forward pass, and the peers' transform
	$(BIN)/python -m benchmarks.embed_rate $(if $(wildcard $(DATA)/mnist.npz),--data $(DATA) --peers-python $(PEERS))

bench-scale: install  ## the map stage as lakes grow, and from and to S3
	$(BIN)/python -m benchmarks.map_scale

bench-stores: install ## calls to an object store by obstore, beside s3fs
	$(BIN)/python -m benchmarks.object_stores --peers-python $(PEERS)

bench-demo: install   ## the demo's seconds and accuracy
	$(BIN)/python -m benchmarks.demo

bench-graph: install  ## the four benchmarks of the graph, one after the other
	$(MAKE) -j1 bench-knn bench-scale-graph bench-calibration bench-joint

bench-knn: install    ## kNN graphs beside pynndescent, hnswlib and faiss
	$(BIN)/python -m benchmarks.graph_knn --data $(DATA) --peers-python $(PEERS)

bench-scale-graph: install  ## kNN graphs of 1M and 4M rows, one and two workers
	$(BIN)/python -m benchmarks.graph_scale --data $(DATA) --peers-python $(PEERS)

bench-calibration: install  ## affinities and memberships beside openTSNE and umap-learn
	$(BIN)/python -m benchmarks.calibration --data $(DATA) --peers-python $(PEERS)

bench-joint: install  ## joint P and edges beside scipy and numpy in memory
	$(BIN)/python -m benchmarks.joint_edges --data $(DATA)

bench-drift: install  ## new digits: what the drift scores say, and how far the map moves
	$(BIN)/python -m benchmarks.drift --data $(DATA)

tables: install  ## the paper's tables beside the peers; SEEDS=1 TABLES="quality earlier study objectives"
	$(BIN)/python -m benchmarks.tables --data $(DATA) --peers-python $(PEERS) --seeds $(SEEDS) --tables $(TABLES)

clipping: install  ## every objective with neither, one or both of the clips
	$(BIN)/python -m benchmarks.clipping --data $(DATA)

clean:          ## remove the environment, caches and the demo
	rm -rf $(VENV) $(AIRFLOW) $(TOOLS) demo week build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
