"""The native sources and the flags they are built with: one place for `setup.py` and the JIT.

Imports nothing of the package and nothing beyond the standard library, because `setup.py` loads this
file by its path before the package exists. CMakeLists.txt takes the same files by the same rule: what
lies in a folder belongs to that folder's library.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

# LibTorch's stable ABI as of 2.10: one build loads in 2.10 and every later release.
TORCH_TARGET = "TORCH_TARGET_VERSION=0x020a000000000000"
MIN_TORCH = (2, 10)

CXX_FLAGS = ["-O3", "-DNDEBUG", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-g0"]
NVCC_FLAGS = ["-O3", "-std=c++17", "-DUSE_CUDA", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
CUDA_ARCHS = "80;90;100"

INSTALL_HINT = "pip install --no-build-isolation -e ."


def source_root() -> Path | None:
    """The folder `csrc`: inside an installed package, beside it in a checkout; None without it."""
    package = Path(__file__).resolve().parent
    for folder in (package / "csrc", package.parent / "csrc"):
        if (folder / "ops" / "library.cpp").is_file():
            return folder
    return None


def core_sources(root: Path) -> list[Path]:
    folders = ("core", "worker", "python")
    return [path for folder in folders for path in sorted((root / folder).rglob("*.cpp"))]


def cpu_sources(root: Path) -> list[Path]:
    return sorted((root / "ops").glob("*.cpp"))


def cuda_sources(root: Path) -> list[Path]:
    return sorted((root / "ops").glob("*.cu"))


def torch_dir() -> Path:
    """Where torch is installed, found without importing it (an import costs seconds)."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise RuntimeError(f"torch is not installed: install torch>=2.10, then `{INSTALL_HINT}`")
    return Path(spec.origin).parent


def pybind11_include() -> Path:
    """pybind11's headers: the package's own, or the copy that torch carries."""
    spec = importlib.util.find_spec("pybind11")
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent / "include"
    if (torch_dir() / "include" / "pybind11").is_dir():
        return torch_dir() / "include"
    raise RuntimeError("pybind11 is not installed: pip install pybind11")


def cxx() -> str:
    """The C++ compiler: $CXX, else g++, else clang++."""
    asked = os.environ.get("CXX")
    for name in [asked] if asked else ["g++", "clang++"]:
        found = shutil.which(name)
        if found:
            return found
    raise RuntimeError(
        f"no C++ compiler ({asked or 'g++ or clang++'} is not on the PATH): "
        "install one (Debian and Ubuntu: apt-get install g++)"
    )


def wants_cuda() -> bool:
    """Whether the CUDA library is built: with a CUDA build of torch, or as KVCACHE_CUDA=0/1 says."""
    asked = os.environ.get("KVCACHE_CUDA")
    if asked in ("0", "1"):
        return asked == "1"
    return (torch_dir() / "lib" / "libtorch_cuda.so").exists() and cuda_home() is not None


def cuda_home() -> Path | None:
    """The CUDA toolkit with an nvcc, or None."""
    on_path = shutil.which("nvcc")
    for folder in (
        os.environ.get("CUDA_HOME"),
        "/usr/local/cuda",
        str(Path(on_path).resolve().parent.parent) if on_path else None,
    ):
        if folder and (Path(folder) / "bin" / "nvcc").exists():
            return Path(folder)
    return None


def gencode_flags() -> list[str]:
    """Machine code for each of $KVCACHE_CUDA_ARCHS ("80;90;100"), and PTX of the last for newer."""
    archs = os.environ.get("KVCACHE_CUDA_ARCHS", CUDA_ARCHS).replace(",", ";").split(";")
    flags = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    return [*flags, f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}"]


def link_flags() -> list[str]:
    if sys.platform == "darwin":
        return ["-undefined", "dynamic_lookup"]
    return ["-ldl"]
