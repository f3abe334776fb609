# SPDX-License-Identifier: Apache-2.0
"""Runs all kernel tests on the emulator under AddressSanitizer and UndefinedBehaviorSanitizer."""

import os
import subprocess
import sys

import pytest

from kvcache.native import build
from tests.machinery.compilers import cxx
from tests.machinery.emulation import ASAN, build_library
from tests.machinery.shared import REPO, sampled

KERNEL_TESTS = sorted(str(path) for path in (REPO / "tests" / "ops").glob("test_*_op.py"))


def run_plainly(*command):
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=REPO)


def run_with_asan(*command):
    # libstdc++ is preloaded as well, because ASan cannot intercept `throw` if libstdc++ is loaded
    # later.
    runtime = " ".join(
        subprocess.run(
            [cxx(build), f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so", "libstdc++.so")
    )
    environment = {
        **os.environ,
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter itself leaks memory
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "KVCACHE_TEST_ASAN": "1",
        "HYPOTHESIS_PROFILE": "ci",  # more examples run without sanitizers
    }
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, cwd=REPO
    )


under_sanitizers = pytest.mark.skipif(ASAN, reason="already runs under sanitizers")


@under_sanitizers
@pytest.mark.exhaustive  # as for all tests that build the emulator with sanitizers
@pytest.mark.parametrize(("call", "report"), [
    ("overflow_(torch.zeros(1000))", "heap-buffer-overflow"),
    ("overflow_int_(torch.full((32,), 2**31 - 1).int())", "signed integer overflow"),
])  # fmt: skip
def test_kernel_fault_is_reported_with_its_location(call, report):
    build_library(asan=True)
    program = (
        f"import torch; from tests.machinery.emulation import emulated_ops; emulated_ops().{call}"
    )
    done = run_with_asan("-c", program)
    assert done.returncode != 0
    assert report in done.stderr and call.partition("_(")[0] + "_kernel" in done.stderr


@pytest.mark.slow
@under_sanitizers
@pytest.mark.parametrize("sanitized", sampled([False, True]))
def test_misaligned_kernel_access_raises(sanitized):
    build_library(asan=sanitized)
    program = (
        "import torch; from tests.machinery.emulation import emulated_ops\n"
        "x = torch.zeros(32)\n"
        "emulated_ops().misaligned_(x[4:])\n"
        "try: emulated_ops().misaligned_(x[1:])\n"
        "except RuntimeError as error: print(error)\n"
    )
    run = run_with_asan if sanitized else run_plainly
    done = run("-c", program)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "misaligned address" in done.stdout and "needs 16 bytes" in done.stdout


@under_sanitizers
@pytest.mark.exhaustive
def test_kernels_stay_inside_their_tensors():
    build_library(asan=True)
    done = run_with_asan("-m", "pytest", "-qs", "-p", "no:cacheprovider", *KERNEL_TESTS)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout
