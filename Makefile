# Every target does all its set-up on a fresh machine. PYTHON chooses the interpreter, 3.11 or newer.
PYTHON ?= python3
BIN := .venv/bin
DEMO := runs/demo
RUNS := $(DEMO)/tresnet_tiny $(DEMO)/resnet_rs_tiny $(DEMO)/genet_tiny
# The budget of the demo: the time of the second of three networks, as measured, so that two fit on any machine.
BUDGET_MS = $$($(BIN)/python -c 'import json; print(sorted(row["ms_p50"] for row in json.load(open("$(DEMO)/bench.json")) if row["name"] in "$(RUNS)".split() and row["ms_p50"])[1])')

# `make test COVERAGE=1` also measures which lines of src run; several calls add up.
COVER := $(if $(COVERAGE),--cov=fullstride --cov-append --cov-report=,)

.PHONY: demo test test-slow coverage check docs clean

# One network of each family, trained on the digits, timed beside timm's ResNet-18, a page about them, and the best one exported.
demo: .venv/ready
	$(BIN)/fullstride train digits --model tresnet_tiny --out $(DEMO)/tresnet_tiny
	$(BIN)/fullstride train digits --model resnet_rs_tiny --out $(DEMO)/resnet_rs_tiny
	$(BIN)/fullstride train digits --model genet_tiny --out $(DEMO)/genet_tiny
	$(BIN)/fullstride bench $(RUNS) timm/resnet18 --out $(DEMO)/bench.json
	$(BIN)/fullstride report $(RUNS) --bench $(DEMO)/bench.json --out $(DEMO)/report.html
	$(BIN)/fullstride export $(RUNS) --budget-ms $(BUDGET_MS) --times $(DEMO)/bench.json --force --out $(DEMO)/best.onnx

test: check
	$(BIN)/pytest -n 2 -m "not gpu and not slow" $(COVER)

# What takes more than some seconds: processes, compilers, exports, the commands of the README. --durations shows why.
test-slow: .venv/ready
	$(BIN)/pytest -n 2 -m "slow and not gpu" --durations 40 $(COVER)

# The share of the lines of src that the tests ran, after both parts with COVERAGE=1. It may not fall.
coverage: .venv/ready
	$(BIN)/coverage report --fail-under=95 --skip-covered --sort=miss

check: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

# The picture of the README and the page behind it, from what the demo measured on this machine.
docs: demo
	$(BIN)/fullstride report $(RUNS) --bench $(DEMO)/bench.json --out docs/demo.html --picture docs/demo.png

# An environment that could not be completed is made anew the next time.
.venv/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@

clean:
	rm -rf .venv runs .coverage .pytest_cache .ruff_cache .import_linter_cache
