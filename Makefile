# make demo, make test: all the setup is done on the way, once.
# Needs python3 (3.11 or later), a C++20 compiler and make.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
TEST_ARGS ?= -n 2 -m "not slow"

TOOLS := $(VENV)/.tools-installed
READY := $(VENV)/.tightship-installed
DOCS_READY := $(VENV)/.docs-installed

# The core once more, built with sanitizers, in an environment of its own that shares the packages of the other.
SANITIZED := build/sanitized
SANITIZED_READY := $(SANITIZED)/.tightship-installed
SANITIZED_TESTS := tests/planners/place $(addprefix tests/planners/test_, core_arrays.py floor.py) tests/verify/test_sound.py \
  $(addprefix tests/planners/evict/test_, engine.py forms.py moves.py cover.py conformance.py)

# The fuzzer alone, beside the environment: nothing else needs it.
FUZZING := build/fuzzing
FUZZING_READY := $(FUZZING)/.installed
FUZZED := graph plan problem module model graphdef lite keras snapshot

.PHONY: demo soak fuzz test test-all gpu dry-cuda docs pictures sanitize lint format bench compatibility setup clean
.DEFAULT_GOAL := test

demo: $(READY)
	$(VENV)/bin/tightship demo

test: $(READY)
	$(PY) -m pytest $(TEST_ARGS)

# The slow ones too. TEST_REPORT=FILE writes how long each took, for tests/support/slow.py.
test-all: $(READY)
	$(PY) -m pytest -n 2 $(if $(TEST_REPORT),--junitxml=$(TEST_REPORT))

# Random cases of everything, judged by the definitions, for SECONDS; goes on where the last campaign ended.
SECONDS ?= 600
soak: $(READY)
	$(PY) benchmarks/soak.py --seconds $(SECONDS)

# Files that a coverage-guided fuzzer makes, FUZZ_SECONDS for each format; the first finding of a format ends it.
FUZZ_SECONDS ?= 60
fuzz: $(FUZZING_READY)
	for kind in $(FUZZED); do \
	  PYTHONPATH=$(FUZZING) $(PY) benchmarks/fuzz.py $$kind -max_total_time=$(FUZZ_SECONDS) || exit; done

# PyTorch's CUDA build (several GB, in an environment of its own) on a CUDA runtime that computes nothing: no GPU needed.
DRY := build/dry-cuda
CUDA_TORCH ?= torch==2.13.0
dry-cuda:
	$(PYTHON) -m venv $(DRY)
	$(DRY)/bin/python -m pip install $(CUDA_TORCH)
	$(DRY)/bin/python -m pip install . transformers pytest hypothesis setuptools
	$(DRY)/bin/python -m pytest -ra tests/execute/test_dry_cuda.py tests/execute/test_dry_offload.py
	TIGHTSHIP_DRY=1 $(DRY)/bin/python -m pytest -ra -m "" tests/execute/test_gpu.py

# Placement and the eviction engine under the address and undefined-behavior sanitizers; the first finding ends it.
# Python does not give back all it takes, so leaks are not looked for.
CORE_SECONDS ?= 60
sanitize: $(SANITIZED_READY)
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	  $(SANITIZED)/bin/python -m pytest -n 2 -m "not slow" $(SANITIZED_TESTS)
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	  $(SANITIZED)/bin/python benchmarks/soak.py core --seconds $(CORE_SECONDS) --state $(SANITIZED)/soak.json

# Every block of the README and of every page is run as it stands, every example too; then the site is built, strictly.
docs: $(DOCS_READY)
	$(PY) -m pytest -n 2 tests/test_readme.py tests/test_docs.py tests/test_examples.py
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet

pictures: $(READY)
	$(PY) docs/pictures.py

CPP := $(wildcard cpp/*.h cpp/*.cpp src/tightship/execute/*.h src/tightship/execute/*.cpp)

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run --Werror $(CPP)
	$(VENV)/bin/mypy

format: $(READY)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(CPP)

bench: $(READY)
	$(PY) benchmarks/train.py

# Every row of docs/compatibility.md, in half an hour; fails if one is neither as in eager nor refused.
compatibility: $(READY)
	$(PIP) install --group compatibility
	$(PY) benchmarks/compatibility.py --write

# Every test and benchmark that needs a CUDA device, in 30 minutes; the table goes into docs/training.md.
gpu: $(READY)
	$(PY) benchmarks/gpu.py --write

setup: $(READY)

# Some distributions ship python3 without ensurepip; the system's pip can then fill the environment.
$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "tightship needs Python 3.11 or later; '$(PYTHON)' is older. Try: make PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV) \
	  || { $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(PY) install pip; } \
	  || { rm -rf $(VENV); echo "no virtual environment: install your system's python3-venv package" >&2; exit 2; }

# pip from 25.1 on knows dependency groups. torch first and by its exact version: resolved together with the rest, pip may choose another build of it,
# which brings gigabytes of GPU libraries along.
$(TOOLS): | $(PY)
	$(PIP) install "pip>=25.1"
	$(PIP) install torch==2.13.0
	$(PIP) install "scikit-build-core>=1.0" "nanobind>=3.0" cmake ninja
	touch $@

# No build isolation: the build folder is kept, so a changed C++ file alone is compiled anew.
$(READY): $(TOOLS) pyproject.toml CMakeLists.txt $(wildcard cpp/*)
	$(PIP) install --no-build-isolation -e ".[demo,huggingface,jax,onnx,solver]" --group dev
	touch $@

$(DOCS_READY): $(READY)
	$(PIP) install --group docs
	touch $@

$(SANITIZED_READY): $(READY) CMakeLists.txt $(wildcard cpp/*)
	$(PY) -m venv --without-pip $(SANITIZED)
	$(PY) -c 'import sys; print(*(p for p in sys.path if p.endswith("site-packages")), sep="\n")' \
	  > "$$($(SANITIZED)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth"
	$(PIP) --python $(SANITIZED)/bin/python install --no-build-isolation --no-deps --force-reinstall \
	  -C cmake.define.TIGHTSHIP_SANITIZE=ON -C build-dir=build/sanitize .
	touch $@

$(FUZZING_READY): $(READY)
	$(PIP) install --no-deps --upgrade --target $(FUZZING) "atheris>=3.0,<4"
	touch $@

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
