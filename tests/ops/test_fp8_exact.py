# SPDX-License-Identifier: Apache-2.0
"""Checks that fp8 conversions are exact, in C++ programs that include the kernels' headers and test
more values than tensor tests could.

Each program takes seconds. With KVCACHE_EXHAUSTIVE=1, it tests billions of quotients and hundreds
of millions of floats, which takes minutes.
"""

import os
import subprocess

import pytest

from kvcache.native import build
from tests.machinery.shared import REPO

EXHAUSTIVE = os.environ.get("KVCACHE_EXHAUSTIVE") == "1"
SOURCES = REPO / "csrc" / "tests" / "exact"


def run(tmp_path, program, *arguments, include=()):
    # With -mfma, the compiler uses the processor's FMA instruction. Otherwise, calls to fma() would
    # take most of the time.
    flags = ["-O2", "-std=c++17", "-ffp-contract=off", "-w"]
    if "fma" in _flags_of_the_processor():
        flags.append("-mfma")
    folders = [build.torch_dir() / "include", *include]
    flags += [f"-isystem{folder}" for folder in folders] + [f"-I{REPO / 'csrc'}"]
    binary = tmp_path / program
    source = SOURCES / f"{program}.cpp"
    subprocess.run([*build.cxx_command(), *flags, str(source), "-o", str(binary)], check=True)
    done = subprocess.run([binary, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.endswith(", 0 differ\n")
    return int(done.stdout.split()[0])


def _flags_of_the_processor():
    try:
        with open("/proc/cpuinfo") as file:
            return next((line.split() for line in file if line.startswith("flags")), [])
    except OSError:
        return []


@pytest.mark.slow
def test_fp8_without_division_equals_true_division(tmp_path):
    num_scales, num_floats = (20_000, 500_000_000) if EXHAUSTIVE else (100, 5_000_000)
    num_compared = run(tmp_path, "division", num_scales, num_floats, 1)
    assert num_compared > num_scales * 2 * 65536


@pytest.mark.slow
def test_fp8_conversions_equal_nvidias_header(tmp_path):
    home = build.cuda_home()
    include = home / "include" if home else None
    if include is None or not (include / "cuda_fp8.h").is_file():
        pytest.skip("no CUDA toolkit with cuda_fp8.h found")
    stride = 7 if EXHAUSTIVE else 997
    assert run(tmp_path, "nvidia", stride, include=[include]) > 2 * (2**32 // stride)
