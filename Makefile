# Every target does all its set-up on a fresh machine. PYTHON chooses the interpreter, 3.11 or newer.
PYTHON ?= python3
BIN := .venv/bin
DEMO := runs/demo
CHOICE := $(BIN)/fullstride choose --target rtx4090-compiled --call-batch 64 --budget-ms 0.2 --out docs/choice.png

FAST := -n 2 --dist worksteal -m "not gpu and not slow"

# Each process that a test starts would compile the whole package again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo demo-page test test-fast test-slow coverage check gpu docs clean

# Handwritten digits and a time per image in, the file that ships and a page about it out, within 6 minutes on 2 cores.
demo: .venv/ready
	$(BIN)/fullstride fit digits --budget-ms 0.5 --hours 0.09 --epochs 30 --weights none --candidates genet_tiny resnet_rs_tiny tresnet_tiny genet_light --resolutions 24 48 --out $(DEMO)

# With `make -j 2` the checks, which take one core, run beside the first tests.
test: check test-fast

test-fast: .venv/ready
	$(BIN)/pytest $(FAST)

# What takes more than some seconds: processes, compilers, exports, the commands of the README. --durations shows why.
# Only the files with such tests are read.
test-slow: .venv/ready
	$(BIN)/pytest -n 2 --dist worksteal -m "slow and not gpu" --durations 40 $$(grep -rl --include='test_*.py' mark.slow tests)

# The fast tests, and the share of the lines of src that they run. It may not fall.
coverage: .venv/ready
	$(BIN)/python -m slipcover --source src/fullstride --json --out .coverage.json -m pytest $(FAST)
	$(BIN)/python -m slipcover --merge .coverage.json --out .coverage.json --fail-under 95 --skip-covered

check: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

# What waits for a GPU, the most valuable first, and docs/reproduce/gpu.md; the same call goes on. Without one
# everything is checked on tiny networks.
MINUTES ?= 30
gpu: .venv/ready
	$(BIN)/python benchmarks/gpu.py --minutes $(MINUTES)

# The picture of Start, and the page of a fit, as the demo measured it here; and the front of the README.
demo-page: demo
	cp $(DEMO)/report.html docs/demo.html
	cp $(DEMO)/files.png docs/demo.png
	$(CHOICE)

# The references, the pictures that need no training, and the site of docs/ in site/: it opens from disk. A warning,
# such as a broken link, is an error. docs/draw_tasks.py and docs/write_notebooks.py train for minutes.
docs: .venv/ready
	$(BIN)/python docs/write_reference.py
	$(CHOICE)
	$(BIN)/fullstride study figures --target v100-fp16 rtx3090 --out runs/figures
	cp runs/figures/*.png docs/reproduce/figures
	$(BIN)/zensical build --clean --strict

# An environment that could not be completed is made anew the next time. A new pip finds the versions in less than half
# of the time. Of 20,000 files of packages few are imported, so they are compiled then.
.venv/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv --upgrade-deps .venv
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[test]'
	@touch $@

clean:
	rm -rf .venv runs site .cache .coverage.json .pytest_cache .ruff_cache .import_linter_cache
