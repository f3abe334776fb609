"""The commit, the machine and the tools of a run. A run works without any of these facts."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def commit(repo: Path = REPO, environment: Mapping[str, str] = os.environ) -> str:
    """The commit: $KVCACHE_COMMIT, else git's word, else the file COMMIT in the checkout."""
    given = environment.get("KVCACHE_COMMIT", "").strip()
    if given:
        return given
    output = output_of(["git", "-C", str(repo), "describe", "--always", "--dirty"])
    if output:
        return output
    try:
        return (repo / "COMMIT").read_text().strip() or "unknown"
    except OSError:
        return "unknown"


def sources_digest(repo: Path = REPO) -> str:
    """A digest of everything that native libraries are built from; it needs no git."""
    digest = hashlib.sha256()
    files = [repo / "setup.py", repo / "kvcache" / "native" / "build.py"]
    for folder in ("core", "worker", "python", "ops"):
        files += (repo / "csrc" / folder).rglob("*")
    for path in sorted(path for path in files if path.suffix in {".py", ".h", ".cpp", ".cu"}):
        digest.update(str(path.relative_to(repo)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def driver() -> str:
    """The driver's version: nvidia-smi's word, else the kernel module's, else what CUDA can say."""
    output = output_of(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    if output:
        return output.splitlines()[0].strip()
    try:
        found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", _DRIVER_FILE.read_text())
        if found:
            return found[1]
    except OSError:
        pass
    number = ctypes.c_int()
    try:  # the driver's library knows the newest CUDA that it serves
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)) == 0:
            return f"unknown, for CUDA {number.value // 1000}.{number.value % 1000 // 10}"
    except (OSError, AttributeError):
        pass
    return "unknown"


def find_tool(name: str) -> str | None:
    """A program's path: on the PATH, beside this Python, in the CUDA toolkit or beside it."""
    beside = Path(sys.executable).with_name(name)
    cuda = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    places = [beside, cuda / "bin" / name, cuda / name / name, cuda / "extras" / name / name]
    places += sorted(Path("/opt/nvidia").glob(f"*/*/{name}"), reverse=True)
    found = shutil.which(name)
    return found or next((str(path) for path in places if path.is_file()), None)


def lacks(needs_build: bool) -> list[str]:
    """A text about what this machine lacks, as far as that shows without importing torch."""
    found = []
    if sys.version_info < (3, 10):  # noqa: UP036  (run from a checkout, which pip never checked)
        found.append(f"Python 3.10 or newer (this is {sys.version.split()[0]})")
    modules = ["torch", "numpy", *(("pybind11", "setuptools") if needs_build else ())]
    found += [f"the Python package {name}" for name in modules if not has_module(name)]
    tools = ("g++", "nvcc") if needs_build else ()
    found += [f"the program {name}" for name in tools if find_tool(name) is None]
    return found


def has_module(name: str) -> bool:
    """Whether Python finds a package; nothing is imported."""
    return importlib.util.find_spec(name) is not None


def output_of(command: list[str], limit_s: float = 5) -> str:
    """The stripped output of a program; empty where it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def processor() -> str:
    """The CPU's name, where the system has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
