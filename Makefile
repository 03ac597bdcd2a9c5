# For developers; `./magi2-farm demo` and `./magi2-farm test` need no make. CI runs the same targets.
PY := .venv/bin/python
BIN := .venv/bin
N ?= 2
SEEDS ?= 1 2 3
JOBS ?= 1000
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest

.PHONY: help setup fmt lint types arch test test-service test-multiprocess test-chaos test-browser test-gpu test-mutants bench-4gpu bench-4gpu-tiny bench-api bench-queue bench-webhooks bench-kernels bench-step demo up worker migrate

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 22

setup: ## make .venv and install everything that tests and checks need
	./magi2-farm setup

fmt: ## format the code and sort its imports
	$(BIN)/ruff check --fix-only . && $(BIN)/ruff format .

lint: ## ruff, formatting, whitespace, import contracts
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && git diff --check && $(BIN)/lint-imports

types: ## mypy, strict
	$(BIN)/mypy

arch: ## tests of the house rules: imports, sizes, links
	$(PYTEST) tests/architecture

test: ## unit, architecture and golden tests (<= 4 minutes on two cores)
	$(PYTEST) -n $(N) tests/unit tests/architecture tests/golden

test-service: ## tests on real PostgreSQL, Valkey and SeaweedFS
	$(PYTEST) -n $(N) tests/service

test-multiprocess: ## tests with several processes
	$(PYTEST) tests/multiprocess

test-chaos: ## T-08 in full: 1,000 jobs under kills for each of SEEDS, 20 with the real engine (an hour; JSON in .state)
	mkdir -p .state
	$(PYTEST) tests/chaos
	OMP_NUM_THREADS=1 $(PY) -m tests.chaos.storm --jobs $(JOBS) --seeds $(SEEDS) --json .state/chaos.json
	OMP_NUM_THREADS=1 $(PY) -m tests.chaos.storm --engine magi2 --jobs 20 --workers 2 --seeds $(firstword $(SEEDS)) --json .state/chaos-real.json

test-browser: ## the dashboard in a headless Chromium; screenshots in build/screenshots
	$(PYTEST) -n $(N) tests/browser

bench-4gpu: ## qualify the layouts on four GPUs; call again until it exits 0 (10 minutes each; JSON in build/qualify)
	$(PY) benchmarks/qualify_4gpu.py --out build/qualify

bench-4gpu-tiny: ## the same at small sizes on four CPU ranks (ten minutes on two cores)
	$(PY) benchmarks/qualify_4gpu.py --out build/qualify-tiny --tiny --budget 3600

bench-api: ## time submits, polls, lists, streams and stops of the api (minutes; exit 1 where a number is missing)
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.api --plots docs/img

bench-queue: ## T-05 to T-07, T-09 to T-11, T-18: the queue on real servers (20 minutes; exit 1 where a number is missing)
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.job_queue --plots docs/img

bench-webhooks: ## T-13 and T-14: flaky, dead and fast receivers; exit 1 where a target is missed
	$(PY) -m benchmarks.webhooks

bench-kernels: ## every kernel beside its torch definition and the ceilings, on one CUDA device (JSON and roofline in .state)
	mkdir -p .state
	$(PY) benchmarks/kernels/bench.py --out .state/kernels.json --plot .state/kernels.svg

bench-step: ## one whole denoising step at 540p and 272p, random weights, on one CUDA device (JSON in .state)
	mkdir -p .state
	$(PY) benchmarks/kernels/step.py --out .state/step.json

test-mutants: ## plant one break per rule and see each caught (minutes, in no tier)
	OMP_NUM_THREADS=1 $(PY) -m tests.mutants.run

test-gpu: ## tests on one CUDA device
	$(PY) -m pytest tests/gpu

demo: ## install, start the farm, render one clip, write the mp4, stop
	./magi2-farm demo

up: ## start the embedded farm and keep it running
	./magi2-farm up

worker: ## start one worker for the farm that the environment names
	./magi2-farm worker --profile tiny-cpu

migrate: ## bring the database that the environment names to the newest schema
	./magi2-farm migrate upgrade
