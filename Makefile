# `make demo` runs the main job, `make test` the tests, `make bench` the short table of step times
# beside other systems. Each sets up .venv on its first call and reuses it afterwards. PYTHON chooses
# the interpreter, TORCH_INDEX another index for torch's wheel.
PYTHON ?= python3
VENV   := .venv
READY  := $(VENV)/.installed
BIN    := $(VENV)/bin

export OMP_NUM_THREADS := 1
export TORCH_INDEX

.PHONY: demo test bench lint format clean

demo: $(READY)
	$(BIN)/python examples/gpt/demo.py

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile

bench: $(READY)
	$(BIN)/python benchmarks/bench.py

lint: $(READY)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	.ci/typecheck $(BIN)/python

format: $(READY)
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info autoshard/*.so

$(READY): pyproject.toml constraints.txt .ci/environment.py $(wildcard setup.py csrc/*)
	$(PYTHON) .ci/environment.py $(VENV)
