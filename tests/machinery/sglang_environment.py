# SPDX-License-Identifier: Apache-2.0
"""Runs the tests of the SGLang plug-ins in a separate environment with SGLang (`make test-sglang`).

    python -m tests.machinery.sglang_environment [-m MODULE] [ARGUMENT ...]

The environment is created once, which takes some minutes and 3 GB. It contains the Python files of
SGLang's build for CUDA, which runs on a CPU with `SGLANG_USE_CPU_ENGINE=1` and the stand-ins in
`tests/machinery/sglang_stubs`. If SGLang cannot be installed, the script prints the reason and
exits successfully. kvcache is used from the checkout, as built by `make setup` for the same Python.
ARGUMENTs are passed to pytest, or to MODULE if it runs instead.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tests.machinery.engine_environment import EngineEnvironment, Unavailable, test_files
from tests.machinery.shared import REPO

VERSION = "0.5.23"  # the tests use SGLang's internals and therefore only run with this version
FOLDERS = Path(os.environ.get("KVCACHE_SGLANG_VENVS") or "~/.cache/kvcache/sglang").expanduser()
TESTS = test_files("packages/kvcache-sglang/tests/kvcache_sglang_tests/test_*.py")
STUBS = REPO / "tests" / "machinery" / "sglang_stubs"
# Requirements of SGLang that are not installed. torch is installed separately, and CUDA and most
# multimodal packages are not needed.
LEFT_OUT = {
    *("torch", "torchaudio", "torchcodec", "torchvision", "torch_memory_saver", "timm", "av"),
    *("cuda-python", "flash-attn-4", "flashinfer_python", "humming-kernels", "quack-kernels"),
    *("nvidia-cutlass-dsl", "nvidia-mathdx", "nvshmem4py-cu13", "tilelang", "sglang-kernel"),
    *("sgl-deep-ep", "sgl-deep-gemm", "sgl-flash-mla", "smg-grpc-servicer", "tml-renderers"),
    *("datasets", "decord2", "deepseek-recipe", "py-spy"),
}
CPU = "[sglang.srt.plugins]\nkvcache_tests = tests.machinery.sglang_cpu:register\n"
NIXL = "nixl==1.5.1", "nixl-cu13==1.5.1"  # needed for stores on a disk
TORCHVISION = "torchvision==0.28.0"  # its requirements include the CUDA build of torch


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", dest="module", default="pytest")
    options, arguments = parser.parse_known_args()
    try:
        environment = _install()
    except Unavailable as missing:
        print(f"SKIPPED: tests with SGLang: {missing}")
        return 0
    settings = {"PYTHONPATH": str(STUBS), "SGLANG_USE_CPU_ENGINE": "1"}
    return environment.run(options.module, arguments, TESTS, settings)


def _install() -> EngineEnvironment:
    environment = EngineEnvironment(FOLDERS / VERSION, ".complete-2")
    if not environment.is_complete:
        environment.create(f"SGLang {VERSION}")
        environment.pip("--no-deps", f"sglang=={VERSION}", TORCHVISION)
        environment.pip("dill")  # SGLang imports this package without requiring it
        environment.pip(*NIXL)
        environment.add_requirements("sglang", LEFT_OUT)
    environment.add_entry_points(CPU)
    return environment


if __name__ == "__main__":
    sys.exit(main())
