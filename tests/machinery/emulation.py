# SPDX-License-Identifier: Apache-2.0
"""Builds and loads the CUDA kernels compiled for the CPU (`torch.ops.kvcache_emul`)."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from kvcache.native import build
from tests.machinery.compilers import cxx
from tests.machinery.shared import REPO

ASAN = os.environ.get("KVCACHE_TEST_ASAN") == "1"
# The vptr check would require type information for torch's classes.
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize=vptr"]
# These headers are precompiled, since parsing them takes seconds per source file.
EMULATOR = REPO / "tools" / "cuda_emulator"
_TORCH_HEADERS = "#include <torch/csrc/stable/library.h>\n#include <torch/csrc/stable/tensor.h>\n"


@functools.cache
def emulated_ops():
    """Return the namespace of the emulated ops. The ops are rebuilt only if csrc has changed.

    KVCACHE_TEST_ASAN=1 adds sanitizers.
    """
    torch.ops.load_library(str(build_library(ASAN)))
    return torch.ops.kvcache_emul


def build_library(asan: bool) -> Path:
    """Build the library of the emulated kernels. Return its path."""
    root = REPO / "csrc"
    return _built([*build.cuda_sources(root), EMULATOR / "emul" / "library.cpp"], asan, "emul")


def build_cpu_library(asan: bool) -> Path:
    """Build the library of the CPU ops as in the package, optionally with sanitizers.

    Return its path.
    """
    return _built(build.cpu_sources(REPO / "csrc"), asan, "cpu")


def _built(sources: list[Path], asan: bool, name: str) -> Path:
    root = REPO / "csrc"
    flags = [
        "-O1",
        *(["-g1"] if asan else []),
        "-std=c++17",
        "-fPIC",
        "-fvisibility=hidden",
        "-Wno-unknown-pragmas",
    ]
    flags += [f"-D{build.TORCH_TARGET}", f"-isystem{build.torch_dir() / 'include'}", f"-I{root}"]
    flags += [f"-I{EMULATOR}"] if name == "emul" else []
    # A misaligned access aborts the launch with an exception (emul/alignment.h).
    flags += ["-fsanitize=alignment", "-fno-sanitize-recover=all"] if name == "emul" else []
    flags += [*SANITIZE, "-fno-omit-frame-pointer"] if asan else []
    flags += ["-fno-sanitize-recover=all"] if asan else []
    folder = REPO / "build" / "emul"
    (folder / "objects").mkdir(parents=True, exist_ok=True)
    shared = digest(*flags, torch.__version__, *_headers(root))
    objects = {s: folder / "objects" / f"{s.stem}-{digest(shared, s)}.o" for s in sources}
    library = folder / digest(*map(str, objects.values())) / f"libkvcache_{name}.so"
    with (folder / f"lock_{name}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            common = folder / "objects" / f"torch-{shared}.h"
            common.write_text(_TORCH_HEADERS)
            _compile(flags, common, common.with_suffix(".h.gch"), "c++-header")
            flags += ["-include", str(common)]
            with ThreadPoolExecutor() as pool:
                list(pool.map(functools.partial(_compile, flags), *zip(*objects.items())))
            library.parent.mkdir(exist_ok=True)
            link = [cxx(build), "-shared", *map(str, objects.values())]
            link += [*(SANITIZE if asan else []), "-o", str(library.with_suffix(".new"))]
            link += [f"-L{build.torch_dir() / 'lib'}", "-ltorch_cpu"]
            subprocess.run(link, check=True)
            library.with_suffix(".new").rename(library)
    return library


def _compile(flags: list[str], source: Path, obj: Path, language: str = "c++") -> None:
    if obj.exists():
        return
    new = obj.with_suffix(".new")
    command = [cxx(build), *flags, "-x", language, "-c", str(source), "-o", str(new)]
    subprocess.run(command, check=True)
    new.rename(obj)


def _headers(root: Path) -> list[Path]:
    folders = (root / "ops", EMULATOR / "emul", root / "worker")
    return sorted(path for folder in folders for path in folder.glob("*.h"))


def digest(*parts: str | Path) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.read_bytes() if isinstance(part, Path) else part.encode())
        digest.update(b"\0")
    return digest.hexdigest()[:16]
