# kvcache: every command of the project. `make demo` and `make test` need only Python 3.11+ with headers
# and venv, g++ and make.
PYTHON ?= python3
# The torch that development pins. PIP_TORCH_ARGS reaches pip, for example the small CPU build:
#   make demo PIP_TORCH_ARGS="--index-url https://download.pytorch.org/whl/cpu"
TORCH ?= 2.13.0
PIP_TORCH_ARGS ?=
VENV ?= .venv
BIN := $(VENV)/bin
# Tests start many processes, which would compile the modules anew.
export PYTHONDONTWRITEBYTECODE :=
GPU_RESULTS ?= benchmarks/results
SECONDS ?= 600
# Whose code several threads run.
THREAD_TESTS := test_threads test_call_guard

NATIVE := $(shell find csrc/core csrc/worker csrc/python csrc/ops -type f)
CLANG_FORMAT_FILES = $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu')

.PHONY: demo test test-vllm bench-vllm test-exhaustive planted-breaks mutants setup lint format ctest cuda-check gpu-less sanitize sanitize-thread soak fuzz dist bench docs gpu gpu-rehearsal clean

demo: setup
	$(BIN)/kvcache demo

test: setup
	$(BIN)/python -m pytest -n auto --dist worksteal

# The tests marked exhaustive: more seeds, sizes and combinations than `make test` has.
test-exhaustive: setup
	HYPOTHESIS_PROFILE=exhaustive $(BIN)/python -m pytest -n auto --dist worksteal -m "exhaustive or hypothesis"

# Plants defects, one at a time; each must be noticed by the tests of `make test`.
planted-breaks: setup
	$(BIN)/python -m tests.machinery.planted_breaks

# The same with the many small changes of tests/machinery/mutants.py; prints how many were noticed of how many. Hours.
mutants: setup
	$(BIN)/python -m tests.machinery.planted_breaks --mutants

setup: $(VENV)/.built

$(VENV)/.deps: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvcache: development needs Python 3.11 or newer, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip "setuptools>=77" wheel numpy "pybind11>=2.13" ninja
	$(BIN)/python -m pip install --quiet $(PIP_TORCH_ARGS) "torch==$(TORCH)"
	touch $@

$(VENV)/.built: $(VENV)/.deps setup.py kvcache/native/build.py $(NATIVE)
	$(BIN)/python -m pip install --quiet --no-build-isolation -e ".[cli,serve,dev]"
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CLANG_FORMAT_FILES)

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CLANG_FORMAT_FILES)

# The C++ build by CMake, and its tests.
ctest: setup
	$(BIN)/cmake -S . -B build/cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	  -DPython3_EXECUTABLE=$(abspath $(BIN))/python
	$(BIN)/cmake --build build/cmake
	$(BIN)/ctest --test-dir build/cmake --output-on-failure -j 2

# The same under AddressSanitizer and UndefinedBehaviourSanitizer; CI runs this one alone.
sanitize: setup
	$(BIN)/cmake -S . -B build/sanitize -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	  -DPython3_EXECUTABLE=$(abspath $(BIN))/python -DKVCACHE_SANITIZE=ON
	$(BIN)/cmake --build build/sanitize
	$(BIN)/ctest --test-dir build/sanitize --output-on-failure -j 2

# The C++ tests that use several threads, under ThreadSanitizer.
sanitize-thread: setup
	$(BIN)/cmake -S . -B build/sanitize-thread -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	  -DPython3_EXECUTABLE=$(abspath $(BIN))/python -DKVCACHE_SANITIZE=thread -DKVCACHE_OPS=OFF
	$(BIN)/cmake --build build/sanitize-thread --target $(THREAD_TESTS)
	for name in $(THREAD_TESTS); do build/sanitize-thread/$$name || exit 1; done

# Random operations for SECONDS each: on the allocator, compared with its plain model; on the native
# manager alone, whose invariants are checked, some hundred times as many. Then runs in which memory must
# stay flat. Prints seeds, rates and memory.
soak: setup
	$(BIN)/python -m tests.machinery.allocator_driver $(SECONDS)
	$(BIN)/cmake -S . -B build/soak -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	  -DPython3_EXECUTABLE=$(abspath $(BIN))/python -DKVCACHE_OPS=OFF
	$(BIN)/cmake --build build/soak --target soak_manager
	build/soak/soak_manager $(SECONDS)
	$(BIN)/python -m tests.machinery.growth

# In vLLM's own schedulers, in a virtual environment of its own with vLLM (of VLLM, a version); once, some
# minutes to make it.
test-vllm: setup
	$(BIN)/python -m tests.machinery.vllm_environment $(VLLM:%=--vllm %)

# vLLM's schedule() with its own manager and with kvcache's, in that environment.
bench-vllm: setup
	$(BIN)/python -m tests.machinery.vllm_environment $(VLLM:%=--vllm %) -m benchmarks.vllm_schedule

# Public calls with wrong and hostile arguments, for SECONDS; prints its seed, and what it finds. SCENES: some
# modules alone.
fuzz: setup
	$(BIN)/python -m tests.machinery.wrong_calls --seconds $(SECONDS) $(SCENES:%=--scene=%)

# Compiles every kernel and checks the machine code; needs nvcc (and cuobjdump), not a GPU.
cuda-check: setup
	$(BIN)/python -m benchmarks.cuda_check

# The tests marked gpu on a CUDA runtime without a GPU, docs/gpu_less.md; needs nvcc and, once, the CUDA
# build of torch (gigabytes). Says so and succeeds where one of them cannot be had. Swaps run under SEEDS
# orders of streams.
gpu-less:
	$(PYTHON) -m tests.machinery.gpu_less test $(SEEDS:%=--seeds %)

# A source distribution, and a wheel built from nothing but it.
dist: setup
	rm -rf dist
	$(BIN)/python setup.py -q sdist
	$(BIN)/python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist dist/*.tar.gz

bench: setup
	$(BIN)/python -m benchmarks

# The documents as a site in build/site, warnings as errors. ruff formats its signatures.
docs: setup $(VENV)/.docs
	PATH="$(abspath $(BIN)):$$PATH" NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "build/site/index.html"

# The extra alone: installing the package with it would build the libraries anew.
$(VENV)/.docs: pyproject.toml $(VENV)/.built
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' > $@.txt
	$(BIN)/python -m pip install --quiet -r $@.txt
	mv $@.txt $@

# Build, check and measure on a machine with an NVIDIA GPU, with that machine's own python3, in under ten
# minutes; docs/measuring.md. SECOND=1: the second run (transfers, loads, FlashInfer).
gpu:
	$(PYTHON) -m benchmarks.gpu --results $(GPU_RESULTS) $(SECOND:1=--second)

# The same run, with small sizes, on the CUDA runtime without a GPU; exit code 3: it cannot be had here.
gpu-rehearsal:
	$(PYTHON) -m benchmarks.gpu --rehearse $(SECOND:1=--second) || [ $$? -eq 3 ]

# The stamp goes with the libraries it stands for.
clean:
	rm -rf build dist *.egg-info kvcache/*.so kvcache/csrc $(VENV)/.built
