# All commands of the kvcache project. `make demo` and `make test` require only g++, make, and
# Python 3.11 or newer with headers and venv.
PYTHON ?= python3
# The torch version used for development. PIP_TORCH_ARGS is passed to pip, for example to install
# the smaller CPU build:
#   make demo PIP_TORCH_ARGS="--index-url https://download.pytorch.org/whl/cpu"
TORCH ?= 2.13.0
PIP_TORCH_ARGS ?=
VENV ?= .venv
SHELL := bash
BIN := $(VENV)/bin
INSTALL = $(BIN)/python -m pip install --no-build-isolation $(patsubst %,-e %,$(wildcard packages/*))
# Keep bytecode caches, because tests start many processes that would otherwise recompile all modules.
export PYTHONDONTWRITEBYTECODE :=
GPU_RESULTS ?= benchmarks/results
SECONDS ?= 600
# C++ tests that run code in several threads.
THREAD_TESTS := test_threads test_call_guard

NATIVE := $(shell find csrc/core csrc/worker csrc/python csrc/ops -type f)
CLANG_FORMAT_FILES = $(shell find csrc tools -name '*.h' -o -name '*.cpp' -o -name '*.cu')

.PHONY: demo test test-slow test-all test-vllm test-sglang test-real bench-vllm test-exhaustive planted-breaks mutants setup lint format ctest cuda-check gpu-less ptx sanitize sanitize-thread soak fuzz wheel prebuilt repair-wheel test-wheel bench docs gpu gpu-libraries gpu-rehearsal clean

demo: $(VENV)/.built
	$(BIN)/kvcache demo

# Run the tests that take less than about a second each, in about three minutes on two cores.
test: setup
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not (slow or exhaustive)"

# Run the tests marked slow, most of which start processes, servers or compilers.
test-slow: setup
	$(BIN)/python -m pytest -n auto --dist worksteal -m "slow and not exhaustive"

# Run the tests marked exhaustive, with more seeds, sizes and combinations than `make test`.
# SHARE=1/3 runs a third of them.
test-exhaustive: setup
	HYPOTHESIS_PROFILE=exhaustive $(BIN)/python -m pytest -n auto --dist worksteal \
	  -m "exhaustive or hypothesis" $(SHARE:%=--share %)

# Run all Python tests that need no engine, in about 25 minutes on two cores.
test-all: test test-slow test-exhaustive

# Plant defects one at a time. The tests that are not marked exhaustive must detect each of them.
planted-breaks: setup
	$(BIN)/python -m tests.machinery.planted_breaks

# Apply the many small changes of tests/machinery/mutants.py one at a time, and print how many of them
# the tests detect. Takes hours.
mutants: setup
	$(BIN)/python -m tests.machinery.planted_breaks --mutants

setup: $(VENV)/.built $(VENV)/.dev

$(VENV)/.deps: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvcache: development needs Python 3.11 or newer, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip "setuptools>=77" wheel numpy "pybind11>=2.13"
	$(BIN)/python -m pip install --quiet $(PIP_TORCH_ARGS) "torch==$(TORCH)"
	touch $@

# The library and all packages, with the requirements of `make demo`.
$(VENV)/.built: $(VENV)/.deps setup.py kvcache/native/build.py kvcache/native/compiler.py $(NATIVE)
	@echo "building the native libraries (log: build/setup.log)"; mkdir -p build
	@set -o pipefail; trap 'echo "interrupted: run make again to continue"; exit 130' INT; \
	  $(INSTALL) --verbose -e ".[transformers]" \
	  2>&1 | tee build/setup.log | sed -un 's/^ *\(\[[0-9]*\/[0-9]*\] \)/\1/p' \
	  || { tail -n 30 build/setup.log; exit 1; }
	touch $@

# What only developers and the documentation need.
$(VENV)/.dev: EXTRAS := cli,serve,dev
$(VENV)/.docs: EXTRAS := docs
$(VENV)/.dev $(VENV)/.docs: pyproject.toml | $(VENV)/.built
	$(INSTALL) --quiet -e ".[$(EXTRAS)]"
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CLANG_FORMAT_FILES)

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CLANG_FORMAT_FILES)

# Build with CMake and run the C++ tests.
ctest: setup
	$(BIN)/cmake -S . -B build/cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	  -DPython3_EXECUTABLE=$(abspath $(BIN))/python
	$(BIN)/cmake --build build/cmake
	$(BIN)/ctest --test-dir build/cmake --output-on-failure -j 2

# Run the same tests as the target ctest, with AddressSanitizer and UndefinedBehaviourSanitizer.
# CI runs this target instead of ctest.
sanitize: setup
	$(BIN)/cmake -S . -B build/sanitize -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	  -DPython3_EXECUTABLE=$(abspath $(BIN))/python -DKVCACHE_SANITIZE=ON
	$(BIN)/cmake --build build/sanitize
	$(BIN)/ctest --test-dir build/sanitize --output-on-failure -j 2

# Run the multithreaded C++ tests with ThreadSanitizer.
sanitize-thread: setup
	$(BIN)/cmake -S . -B build/sanitize-thread -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	  -DPython3_EXECUTABLE=$(abspath $(BIN))/python -DKVCACHE_SANITIZE=thread -DKVCACHE_OPS=OFF
	$(BIN)/cmake --build build/sanitize-thread --target $(THREAD_TESTS)
	for name in $(THREAD_TESTS); do build/sanitize-thread/$$name || exit 1; done

# Run the simulator for SECONDS: random operations of engines with a store and transfers between them. Then run
# random operations on the native manager for another SECONDS, at about a hundred times the
# rate, and check its invariants. Finally, check that memory use does not grow. Prints seeds, rates and
# memory use.
soak: setup
	$(BIN)/python -m tests.simulator --seed $$(date +%s) --seconds $(SECONDS)
	$(BIN)/cmake -S . -B build/soak -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	  -DPython3_EXECUTABLE=$(abspath $(BIN))/python -DKVCACHE_OPS=OFF
	$(BIN)/cmake --build build/soak --target soak_manager
	build/soak/soak_manager $(SECONDS)
	$(BIN)/python -m tests.machinery.growth

# Run the tests in vLLM's schedulers, in a separate virtual environment with vLLM. VLLM=0.32.0 selects
# a version, and VLLM=newest selects the newest version on PyPI. ARGS are passed to pytest; for example,
# `-o addopts=` also runs the tests marked exhaustive. Creating the environment takes a few minutes.
test-vllm: setup
	$(BIN)/python -m tests.machinery.vllm_environment $(VLLM:%=--vllm %) $(ARGS)

# Run the tests of the plug-ins for SGLang, in a separate virtual environment with SGLang. ARGS are passed
# to pytest. Creating the environment takes a few minutes.
test-sglang: setup
	$(BIN)/python -m tests.machinery.sglang_environment $(ARGS)

# Run the tests that need NIXL, Mooncake, Dynamo or a browser, which are installed into a folder outside
# the checkout. Skipped tests are treated as failures.
test-real: setup
	$(BIN)/python -m tests.machinery.real_parts -n auto --dist worksteal

# Measure vLLM's schedule() with vLLM's KV cache manager and with kvcache's, in the same
# environment.
bench-vllm: setup
	$(BIN)/python -m tests.machinery.vllm_environment $(VLLM:%=--vllm %) -m benchmarks.vllm_schedule

# Call the public API with invalid and hostile arguments for SECONDS, or CALLS times. Prints the seed
# and any findings. SCENES restricts the run to the given modules, and SEED repeats an earlier run.
fuzz: setup
	$(BIN)/python -m tests.machinery.hostile wrong --seconds $(SECONDS) $(CALLS:%=--calls %) \
	  $(SEED:%=--seed %) $(SCENES)

# Compile every kernel, with warnings and register spills as errors. Requires nvcc, but no GPU.
cuda-check: setup
	$(BIN)/python tools/cuda_check.py

# Run the tests marked gpu on a CUDA runtime without a GPU (docs/gpu_less.md). Requires nvcc, and
# downloads the CUDA build of torch (gigabytes) once. If nvcc or torch is unavailable, prints a message
# and succeeds. Swaps are tested with SEEDS different orders of streams.
gpu-less: ptx
	$(PYTHON) -m tests.machinery.gpu_less test $(SEEDS:%=--seeds %)

# Interpret the PTX of the kernels: results, data races and memory transactions, and mutants without a
# barrier, wait or fence (docs/gpu_less.md). Requires nvcc. SEED selects a random order of threads.
ptx: setup
	$(BIN)/python -m tests.machinery.ptx $(SEED:%=--seed %)

# Build a source distribution and, from that distribution alone, a wheel with all native libraries, and the
# wheels of the packages (docs/building.md#wheels). The CUDA library is included if nvcc is found, unless
# KVCACHE_CUDA overrides this.
WHEEL_ARCHS := 80;90;100;110;120
NVCC := $(wildcard $(or $(CUDA_HOME),/usr/local/cuda)/bin/nvcc)$(shell command -v nvcc)
wheel: setup
	rm -rf dist build/wheel packages/*/build
	$(BIN)/python setup.py -q sdist
	KVCACHE_CUDA="$${KVCACHE_CUDA:-$(if $(NVCC),1,0)}" KVCACHE_CUDA_ARCHS="$(WHEEL_ARCHS)" \
	  $(BIN)/python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir build/wheel dist/*.tar.gz
	$(MAKE) repair-wheel WHEEL="$$(echo build/wheel/*.whl)" DIST=dist AUDITWHEEL=$(BIN)/auditwheel
	$(BIN)/python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist packages/*
	rm -rf packages/*/build

# Build all libraries once, in build/prebuilt/kvcache. Wheels for other Python versions reuse the op
# libraries in this folder (KVCACHE_PREBUILT).
prebuilt:
	KVCACHE_CUDA=1 KVCACHE_CUDA_ARCHS="$(WHEEL_ARCHS)" $(BIN)/python setup.py build_ext \
	  --build-lib build/prebuilt --build-temp build/prebuilt/objects

# Tag a wheel for manylinux. The libraries of torch and CUDA are excluded, because torch provides them. Also
# called by cibuildwheel.
repair-wheel:
	PATH="$(abspath $(BIN)):$$PATH" $(AUDITWHEEL) repair --exclude 'libtorch*.so' --exclude libc10.so \
	  --exclude 'libcudart.so.*' --wheel-dir "$(DIST)" "$(WHEEL)"

# Install the wheel in a fresh virtual environment without a compiler, and use it there.
test-wheel: wheel
	$(BIN)/python -m tests.machinery.wheel_check --torch $(TORCH)

bench: setup
	$(BIN)/python -m benchmarks $(ARGS)

# Build the documentation site in build/site, with warnings as errors. ruff formats the signatures.
docs: setup $(VENV)/.docs
	PATH="$(abspath $(BIN)):$$PATH" NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "build/site/index.html"

# Check and measure on a machine with an NVIDIA GPU, using its python3 (docs/measuring.md). LEASE=2
# repeats what failed or may vary in an earlier `make gpu`. ONLY=nixl runs this stage.
gpu:
	$(PYTHON) -m benchmarks.gpu --results $(GPU_RESULTS) $(LEASE:%=--lease %) $(ONLY:%=--only %)

# Build the libraries that `make gpu` uses on that machine, in build/gpu-libraries.
gpu-libraries: setup
	$(BIN)/python -m benchmarks.gpu.workspace build/gpu-libraries $(GPU_PYTHON:%=--python %)

# The same run as `make gpu`, with small sizes, on the CUDA runtime without a GPU. Exit code 3 means that
# this runtime is unavailable on the machine.
gpu-rehearsal:
	$(PYTHON) -m benchmarks.gpu --rehearse $(LEASE:%=--lease %) $(ONLY:%=--only %) || [ $$? -eq 3 ]

# Also remove the stamp file, so that the next build recreates the libraries.
clean:
	rm -rf build dist *.egg-info packages/*/build packages/*/src/*.egg-info kvcache/*.so kvcache/csrc $(VENV)/.built
