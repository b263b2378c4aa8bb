# Two commands do everything, set-up included:   make quickstart   make test
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: quickstart test coverage setup lint types lock clean

quickstart: $(STAMP)  ## distil a tiny student from a tiny teacher and draw what happened
	$(BIN)/distill quickstart

test: $(STAMP) lint types  ## the whole test suite
	$(BIN)/python -m pytest

coverage: $(STAMP)  ## branch coverage of the tests that start no engine
	$(BIN)/python -m pytest -q -m "not engine" --cov --cov-report=term:skip-covered

setup: $(STAMP)  ## the virtual environment alone

$(STAMP): requirements/cpu.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/cpu.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

types: $(STAMP)
	$(BIN)/mypy

lock:  ## resolve requirements/cpu.lock anew
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile requirements/cpu.in --override requirements/overrides.txt --python-version 3.11 \
		--no-annotate --no-header $(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS)) \
		--output-file requirements/cpu.lock

clean:
	rm -rf $(VENV) .cache runs
