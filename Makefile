# make demo   set up what is needed, then run the seven studies, the lessons and a speed test, and write the page; with
#             TORCH=1 torch is installed to be timed beside us, also where that takes gigabytes
# make test   set up what is needed, then lint, type-check and test
# make bench  the CPU benchmark; the record goes to benchmarks/records/
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
SOURCES := pyproject.toml CMakeLists.txt README.md LICENSE $(shell find src -type f -not -name '*.pyc' -not -name '*.so')
# The C++ core is built in build/wheel, for this machine only, and only what changed is compiled again; so the build
# tools live in the venv.
ISA = $(shell $(PYTHON) -c "import runpy; print(runpy.run_path('src/flashtile/backends/native/library.py')['candidates']()[0])")
INSTALL = $(PIP) install --no-build-isolation -Cbuild-dir=build/wheel -Ccmake.define.FLASHTILE_ISA=$(ISA)
PYTEST_ARGS ?= -n 2 --dist worksteal
PINNED_TORCH := torch==2.13.0

.PHONY: demo test lint bench clean
.DELETE_ON_ERROR:

demo: $(VENV)/.package
	@sh benchmarks/torch.sh $(BIN)/python "$(PINNED_TORCH)" $(TORCH)
	@$(BIN)/flashtile demo

test: lint
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.tested
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy

bench: $(VENV)/.tested
	@$(BIN)/flashtile bench cpu

clean:
	rm -rf $(VENV) build dist flashtile-demo .pytest_cache .mypy_cache .ruff_cache

$(VENV)/.tools:
	@echo "setting up $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install "scikit-build-core>=0.11" cmake ninja
	@touch $@

$(VENV)/.package: $(VENV)/.tools $(SOURCES)
	@echo "building and installing flashtile"
	@$(INSTALL) ".[cli,report]"
	@$(BIN)/flashtile doctor --brief
	@touch $@

# torch first and alone: what comes after it then keeps to its version. Triton last and alone: the Hopper kernels are
# compiled by this one, and a torch for CUDA asks for another.
$(VENV)/.tested: $(VENV)/.package pyproject.toml
	@echo "installing what the tests need"
	@$(PIP) install "$(PINNED_TORCH)" "numpy<2.4"
	@$(INSTALL) ".[dev]"
	@if [ "$$(uname)" = Linux ]; then $(PIP) install --no-deps "triton==3.6.0"; fi
	@$(PIP) install "transformers>=5" || echo "no transformers here: tests of its models are skipped"
	@sh tests/support/browser.sh $(BIN)/python
	@touch $@
