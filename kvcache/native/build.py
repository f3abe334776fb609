# SPDX-License-Identifier: Apache-2.0
"""The native sources and their build flags, shared by `setup.py`, CMake and the JIT.

This module imports only the standard library, because `setup.py` imports it before the package is
installed. Here and in CMakeLists.txt, all source files in a folder belong to the library of this folder.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# Target LibTorch's stable ABI as of torch 2.10. A build then runs with torch 2.10 and later releases.
TORCH_TARGET = "TORCH_TARGET_VERSION=0x020a000000000000"

CXX_FLAGS = ["-O3", "-DNDEBUG", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-g0"]
CXX_FLAGS += ["-ffp-contract=off"]  # rounds alike on all CPUs
NVCC_FLAGS = ["-O3", "-std=c++17", "-DUSE_CUDA", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
CUDA_ARCHS = ("80", "90", "100")  # default architectures, if the toolkit supports them

OLDEST_TORCH = (2, 10)
INSTALL_HINT = "pip install --no-build-isolation ."  # to be run in a checkout


def source_root() -> Path | None:
    """Return the folder `csrc`, in the installed package or next to it in a checkout, or None."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "csrc", package.parent / "csrc"):
        if (folder / "ops" / "library.cpp").is_file():
            return folder
    return None


def core_sources(root: Path) -> list[Path]:
    folders = ("core", "sanitizer", "worker", "python")
    return [path for folder in folders for path in sorted((root / folder).rglob("*.cpp"))]


def cpu_sources(root: Path) -> list[Path]:
    # The CPU op library and the control plane share the code that maps slots.
    return [*sorted((root / "ops").glob("*.cpp")), root / "worker" / "map_slots.cpp"]


def cuda_sources(root: Path) -> list[Path]:
    return sorted((root / "ops").glob("*.cu"))


def torch_dir() -> Path:
    """Return torch's folder without importing torch, which would take seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise RuntimeError(
            "the build does not find torch: `pip install 'torch>=2.10' 'setuptools>=77' pybind11`, then "
            f"`{INSTALL_HINT}`"
        )
    return Path(spec.origin).parent


def check_torch() -> None:
    """Raise RuntimeError if torch is missing or too old."""
    torch_dir()
    with contextlib.suppress(PackageNotFoundError):  # torch was built from source without metadata
        check_torch_version(version("torch"))


def check_torch_version(found: str) -> None:
    """Raise RuntimeError if a version of torch ("2.13.0+cpu") is older than 2.10."""
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < OLDEST_TORCH:
        raise RuntimeError(f"torch is {found}: expected 2.10 or newer; `pip install -U torch`")


def pybind11_include() -> Path:
    """Return the folder with pybind11's headers, from the package pybind11 or from torch."""
    for package in ("pybind11", "torch"):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            include = Path(spec.origin).parent / "include"
            if (include / "pybind11" / "pybind11.h").is_file():
                return include
    raise RuntimeError("the build needs pybind11, which is not installed: `pip install pybind11`")


def python_include() -> Path:
    """Return the folder with Python's headers, which distributions package separately."""
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").is_file():
        raise RuntimeError(
            f"Python's headers are missing ({include / 'Python.h'}): install them "
            "(Debian and Ubuntu: apt-get install python3-dev)"
        )
    return include


def cxx_command() -> list[str]:
    """Return the C++ compiler and its arguments from $CXX ("ccache g++"), or g++ or clang++."""
    asked = os.environ.get("CXX", "").strip()
    # Try $CXX as a single word first, because a path may contain spaces.
    for words in [[asked], shlex.split(asked)] if asked else [["g++"], ["clang++"]]:
        found = shutil.which(words[0])
        if found:
            return [found, *words[1:]]
    raise RuntimeError(
        f"no C++ compiler ({asked or 'g++ or clang++'} is not on the PATH): "
        "install one (Debian and Ubuntu: apt-get install g++)"
    )


def wants_cuda() -> bool:
    """Return whether the package will contain the CUDA library.

    If set, KVCACHE_CUDA (0 or 1) decides. Otherwise, the library is included if it is prebuilt, or if
    torch is built with CUDA and a CUDA toolkit is found.
    """
    asked = os.environ.get("KVCACHE_CUDA", "")
    if asked not in ("", "0", "1"):
        raise RuntimeError("KVCACHE_CUDA is " + repr(asked) + ": expected 0 or 1")
    if asked:
        return asked == "1"
    if prebuilt("libkvcache_cuda.so") is not None:
        return True
    return (torch_dir() / "lib" / "libtorch_cuda.so").exists() and cuda_home() is not None


def prebuilt(file: str) -> Path | None:
    """Return the library with this name in the folder KVCACHE_PREBUILT, or None.

    The op libraries do not depend on the Python version, so all wheels use the same build.
    """
    folder = os.environ.get("KVCACHE_PREBUILT")
    if not folder:
        return None
    if not Path(folder).is_dir():
        raise RuntimeError(
            "KVCACHE_PREBUILT is " + repr(folder) + ": expected a folder with built libraries"
        )
    return path if (path := Path(folder, file)).is_file() else None


def cuda_home() -> Path | None:
    """Return a CUDA toolkit with nvcc, from $CUDA_HOME, /usr/local/cuda or the PATH, or None."""
    on_path = shutil.which("nvcc")
    for folder in (
        os.environ.get("CUDA_HOME"),
        "/usr/local/cuda",
        str(Path(on_path).resolve().parent.parent) if on_path else None,
    ):
        if folder and (Path(folder) / "bin" / "nvcc").exists():
            return Path(folder)
    return None


def cudart_folder(home: Path, scratch: Path) -> Path:
    """Return a folder in which the linker finds CUDA's runtime library for ``-lcudart``.

    NVIDIA's installers place the library in ``lib64``, distributions in ``targets``, and conda in
    ``lib``. pip's wheels contain only ``lib/libcudart.so.13``. In this case, a symbolic link without the
    version is created in ``scratch``. Raises RuntimeError if there is no library.
    """
    target = f"targets/{platform.machine()}-linux/lib"
    folders = [home / name for name in ("lib64", target, "lib")]
    for folder in folders:
        if (folder / "libcudart.so").exists():
            return folder
    versions = {
        int(path.name.rpartition(".")[2]): path
        for folder in reversed(folders)
        for path in folder.glob("libcudart.so.*")
        if path.name.count(".") == 2 and path.name.rpartition(".")[2].isdigit()
    }
    if not versions:
        places = ", ".join(str(folder) for folder in folders)
        raise RuntimeError(
            f"no libcudart.so in {home}: expected CUDA's runtime in one of {places}; install it, or "
            "set CUDA_HOME to a toolkit that has it"
        )
    scratch.mkdir(parents=True, exist_ok=True)
    link = scratch / "libcudart.so"
    link.unlink(missing_ok=True)
    link.symlink_to(versions[max(versions)].resolve())
    return scratch


@functools.cache
def toolkit_archs(home: Path) -> tuple[str, ...]:
    """Return the architectures for which a toolkit's nvcc can compile ("75", "80", ...)."""
    nvcc = str(home / "bin" / "nvcc")
    done = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True)
    found = [line.strip().removeprefix("compute_") for line in done.stdout.splitlines()]
    if done.returncode != 0 or not found:
        raise RuntimeError(f"{nvcc} --list-gpu-arch failed: {done.stderr.strip()}")
    return tuple(found)


def cuda_archs(present: Sequence[str] = ()) -> list[str]:
    """Return the architectures to compile for.

    $KVCACHE_CUDA_ARCHS ("80;90;100") takes precedence, followed by the architectures of the devices that
    are `present`, and by CUDA_ARCHS. Architectures that the toolkit does not support are omitted. If none
    remain, the newest architecture of the toolkit that is older than the requested ones is used.

    Raises:
        RuntimeError: There is no nvcc, the toolkit lacks an architecture in $KVCACHE_CUDA_ARCHS, or
            it has no architecture that runs on the devices.
    """
    home = cuda_home()
    if home is None:
        raise RuntimeError("no nvcc was found: set CUDA_HOME")
    known = toolkit_archs(home)
    asked = re.split("[;, ]+", os.environ.get("KVCACHE_CUDA_ARCHS", "").strip(";, "))
    if asked != [""]:
        for arch in asked:
            if arch.rstrip("af") not in known:
                raise RuntimeError(
                    f"KVCACHE_CUDA_ARCHS has {arch}: expected architectures that the toolkit in {home} "
                    f"has ({', '.join(known)}), or a newer toolkit (CUDA_HOME)"
                )
        return asked
    wanted = present or CUDA_ARCHS
    archs = [arch for arch in wanted if arch in known]
    # A newer device can run the PTX of an older architecture.
    older = [arch for arch in known if any(int(arch) < int(w) for w in wanted)]
    archs = archs or sorted(older, key=int)[-1:]
    if not archs:
        raise RuntimeError(
            f"the toolkit in {home} compiles for {', '.join(known)}: expected one of "
            f"{', '.join(wanted)}; set CUDA_HOME to another toolkit, or KVCACHE_CUDA_ARCHS"
        )
    return archs


def gencode_flags(present: Sequence[str] = ()) -> list[str]:
    """Return nvcc's flags for each of `cuda_archs`, and for PTX that newer devices compile."""
    archs = cuda_archs(present)
    flags = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    return [*flags, f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}"]


def link_flags() -> list[str]:
    if sys.platform == "darwin":
        return ["-undefined", "dynamic_lookup"]
    return ["-ldl"]


if __name__ == "__main__":  # called by CMake
    archs = cuda_archs()
    print(";".join([*(f"{arch}-real" for arch in archs[:-1]), archs[-1]]))
