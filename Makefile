# Each target does all its set-up on a fresh machine. PYTHON chooses the interpreter, 3.11 or newer.
PYTHON ?= python3
BIN := .venv/bin
DEMO := runs/demo
BUDGET_MS := 5

.PHONY: demo test check clean

demo: .venv/ready
	$(BIN)/fullstride train digits --model tresnet_tiny --out $(DEMO)/tresnet_tiny
	$(BIN)/fullstride train digits --model resnet_rs_tiny --out $(DEMO)/resnet_rs_tiny
	$(BIN)/fullstride train digits --model genet_tiny --out $(DEMO)/genet_tiny
	$(BIN)/fullstride bench $(DEMO)/tresnet_tiny $(DEMO)/resnet_rs_tiny $(DEMO)/genet_tiny timm/resnet18 --out $(DEMO)/bench.json
	$(BIN)/fullstride export $(DEMO)/tresnet_tiny $(DEMO)/resnet_rs_tiny $(DEMO)/genet_tiny --budget-ms $(BUDGET_MS) --out $(DEMO)/best.onnx
	$(BIN)/fullstride report $(DEMO)/tresnet_tiny $(DEMO)/resnet_rs_tiny $(DEMO)/genet_tiny --bench $(DEMO)/bench.json --out $(DEMO)/report.html

test: check
	$(BIN)/pytest -n 2 -m "not gpu and not slow"

check: .venv/ready
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/pyright
	$(BIN)/lint-imports

.venv/ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@

clean:
	rm -rf .venv runs .pytest_cache .ruff_cache
