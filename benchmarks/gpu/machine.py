# SPDX-License-Identifier: Apache-2.0
"""Collects facts about a run's commit, machine and tools. Each fact may be unavailable."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def commit(repo: Path = REPO, environment: Mapping[str, str] = os.environ) -> str:
    """Return the commit from $KVCACHE_COMMIT, git, or the file COMMIT in the checkout."""
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
    """Return a digest of all sources of native libraries. Does not require git."""
    digest = hashlib.sha256()
    files = [repo / "setup.py", repo / "kvcache" / "native" / "build.py"]
    for folder in ("core", "worker", "python", "ops"):
        files += (repo / "csrc" / folder).rglob("*")
    for path in sorted(path for path in files if path.suffix in {".py", ".h", ".cpp", ".cu"}):
        digest.update(str(path.relative_to(repo)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def driver() -> str:
    """Return the driver version from nvidia-smi, the kernel module, or CUDA."""
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
    try:  # the driver library reports the newest CUDA version that it supports
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)) == 0:
            return f"unknown, for CUDA {number.value // 1000}.{number.value % 1000 // 10}"
    except (OSError, AttributeError):
        pass
    return "unknown"


def find_tool(name: str) -> str | None:
    """Return a program's path, found in PATH, next to this Python, or in or next to the CUDA toolkit."""
    beside = Path(sys.executable).with_name(name)
    cuda = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    places = [beside, cuda / "bin" / name, cuda / name / name, cuda / "extras" / name / name]
    places += sorted(Path("/opt/nvidia").glob(f"*/*/{name}"), reverse=True)
    found = shutil.which(name)
    return found or next((str(path) for path in places if path.is_file()), None)


def lacks(needs_build: bool) -> list[str]:
    """Return messages about missing requirements that can be detected without importing torch."""
    found = []
    if sys.version_info < (3, 10):  # noqa: UP036  (run from a checkout, which pip never checked)
        found.append(f"Python 3.10 or newer (this is {sys.version.split()[0]})")
    modules = ["torch", "numpy", *(("pybind11", "setuptools") if needs_build else ())]
    found += [f"the Python package {name}" for name in modules if not has_module(name)]
    tools = ("g++", "nvcc") if needs_build else ()
    found += [f"the program {name}" for name in tools if find_tool(name) is None]
    header = Path(sysconfig.get_path("include"), "Python.h")
    if needs_build and not header.is_file():
        found.append(f"Python's headers ({header}; carry libraries: `make gpu-libraries`)")
    return found


def has_module(name: str) -> bool:
    """Return whether Python finds a package, without importing it."""
    return importlib.util.find_spec(name) is not None


def output_of(command: list[str], limit_s: float = 5) -> str:
    """Return a program's stripped output, or "" if the program is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def processor() -> str:
    """Return the CPU's name if the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def write_results(path: Path, contents: Mapping[str, object]) -> None:
    """Write JSON with one line per key of the file and of its sections and, in lists of rows, one line
    per row. Dictionaries that contain such lists are written in the same way.
    """
    path.write_text(_text(contents, 0) + "\n")


def _text(value: object, depth: int) -> str:
    inner, outer = "\n" + " " * (depth + 1), "\n" + " " * depth
    if isinstance(value, Mapping) and (depth < 2 or _has_rows(value)):
        lines = [f"{json.dumps(key)}: {_text(each, depth + 1)}" for key, each in value.items()]
        return "{" + inner + ("," + inner).join(lines) + outer + "}"
    if _is_rows(value):
        return "[" + inner + ("," + inner).join(map(_row, value)) + outer + "]"
    return _row(value)


def _row(value: object) -> str:
    return json.dumps(value, allow_nan=False)


def _is_rows(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _has_rows(value: Mapping) -> bool:
    return any(
        _is_rows(each) or (isinstance(each, Mapping) and _has_rows(each)) for each in value.values()
    )
