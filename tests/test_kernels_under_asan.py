"""Every kernel test once more, emulated, with AddressSanitizer watching every access."""

import os
import subprocess
import sys

import pytest

from kvcache import _build
from tests.emulation import ASAN, build_library
from tests.shared import REPO

KERNEL_TESTS = sorted(str(path) for path in (REPO / "tests").glob("test_*_op.py"))


def run_with_asan(*command):
    # libstdc++ too: loaded after ASan it would leave ASan's hook of `throw` without a target.
    runtime = " ".join(
        subprocess.run(
            [_build.cxx(), f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")
    )
    environment = {
        **os.environ,
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own
        "KVCACHE_TEST_ASAN": "1",
    }
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, cwd=REPO
    )


@pytest.mark.skipif(ASAN, reason="this is the run under AddressSanitizer itself")
def test_an_out_of_bounds_write_of_a_kernel_is_reported():
    build_library(asan=True)
    done = run_with_asan(
        "-c",
        "import torch; from tests.emulation import emulated_ops; "
        "emulated_ops().overflow_(torch.zeros(1000))",
    )
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr and "overflow_kernel" in done.stderr


@pytest.mark.skipif(ASAN, reason="this is the run under AddressSanitizer itself")
def test_kernels_stay_inside_their_tensors():
    build_library(asan=True)
    done = run_with_asan("-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", *KERNEL_TESTS)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout
