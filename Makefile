# Taken for granted: python3 and make. All else comes into .venv, held to the hashes in requirements*.txt.
# The same .venv serves running and developing: requirements-dev.txt has the pins of requirements.txt.

# Given on the command line: make start ONCE=1 HOST=127.0.0.1 PORT=8971. HOST and PORT are emptied
# here because a shell may export a HOST of its own.
HOST =
PORT =

# Two -q leave only errors. Compiling at install costs more than it saves: python compiles what it uses.
INSTALL = .venv/bin/pip install -qq --no-compile

# MINUTES and FROM are given on the command line, as HOST and PORT are.
MINUTES =
FROM =

.PHONY: start test nightly night check-deploy requirements clean

# A coordinator on its embedded store (var/kvaccord.db), with the recorded start played to it.
# ONCE=1 ends there, with the rehearsal's exit code; otherwise it stays up.
start: .venv/.runtime
	.venv/bin/kvaccord rehearse --serve \
	    $(if $(ONCE),--once) $(if $(HOST),--host $(HOST)) $(if $(PORT),--port $(PORT))

test: .venv/.dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/pytest

# What takes too long for every commit. `make night` searches until it is stopped.
nightly: test
	.venv/bin/pytest -m nightly
	KVACCORD_NIGHT=1 .venv/bin/pytest tests/crash --timeout 0
	KVACCORD_EXAMPLES_TIMES=30 .venv/bin/pytest tests/properties --timeout 0
	.venv/bin/python -m tests.crash --engines 200 --kills 100
	.ci/vllm
	$(MAKE) night MINUTES=45

# Seed after seed on every core until stopped, or for MINUTES; FROM=SEED goes on from there.
night: .venv/.dev
	.venv/bin/python -m tests.simulation --night \
	    $(if $(MINUTES),--minutes $(MINUTES)) $(if $(FROM),--from $(FROM))

check-deploy:
	docker compose config -q

# Pins stay as they are unless pyproject.toml asks for others; UPGRADE=1 takes the newest of all.
# The build backend and what an editable install needs are pinned too, so that nothing is installed
# without a hash. Universal: one file for every platform and Python that pyproject.toml admits.
COMPILE = .venv/bin/uv pip compile -q --universal --generate-hashes --python-version 3.11 \
    --custom-compile-command 'make requirements' $(if $(UPGRADE),--upgrade) --extra server

requirements: .venv/.dev
	printf 'hatchling\neditables\n' \
	    | $(COMPILE) -o requirements.txt pyproject.toml -
	printf 'hatchling\neditables\nuv\n' \
	    | $(COMPILE) -o requirements-dev.txt --group dev -c requirements.txt pyproject.toml -

# var/ stays: it holds the store.
clean:
	rm -rf .venv dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	python3 -m venv .venv

.venv/.runtime: requirements.txt pyproject.toml | .venv/bin/python
	$(INSTALL) --require-hashes -r requirements.txt
	$(INSTALL) --no-deps --no-build-isolation -e .
	touch $@

.venv/.dev: requirements-dev.txt pyproject.toml | .venv/bin/python
	$(INSTALL) --require-hashes -r requirements-dev.txt
	$(INSTALL) --no-deps --no-build-isolation -e .
	touch $@
