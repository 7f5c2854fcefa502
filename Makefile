# make demo   build everything in a private .venv and watch the embedded model write
# make test   build, and run the quick tests
# make lint   ruff, mypy and codespell
# make docs   the documentation as a site, build/docs/index.html
# make check  everything that CI runs
#
# Needs a C++17 compiler, Python >= 3.10 and git. CUDA is used when its toolkit and a GPU are found.
# PYTHON=python3.12 chooses another Python; CMAKE_ARGS passes options to CMake, such as -DGGML_CUDA=OFF.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# What the compiled part is made of: only a change of these builds again (Python files are used in place).
BUILD_INPUTS := pyproject.toml CMakeLists.txt $(wildcard cmake/*) $(wildcard src/hotexperts/*) \
                vendor/fetch.py vendor/llama.cpp.lock $(wildcard vendor/patches/*)

.PHONY: demo test lint docs check clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	$(BIN)/pyhotexperts demo

test: $(VENV)/.installed
	$(BIN)/python -m pytest -q $(PYTEST_FLAGS)

lint: $(VENV)/.lint-tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

docs: $(VENV)/.installed
	$(PIP) install --no-build-isolation --editable ".[docs]"
	$(BIN)/sphinx-build -W docs build/docs

check:
	bash .ci/run

$(VENV)/.created:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip
	touch $@

$(VENV)/.installed: $(VENV)/.created $(BUILD_INPUTS)
	@echo "building pyhotexperts: about 3 minutes on 2 cores the first time"
	$(PIP) install "scikit-build-core>=0.11,<2" "cffi>=1.17" "cmake>=3.26" ninja
	$(PIP) install --no-build-isolation --editable ".[test]"
	touch $@

$(VENV)/.lint-tools: $(VENV)/.installed
	$(PIP) install --no-build-isolation --editable ".[test,lint]"
	touch $@

clean:
	rm -rf build dist $(VENV)
