"""Builds and loads the CUDA kernels compiled for the CPU: `torch.ops.kvcache_emul`."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from kvcache import _build
from tests.shared import REPO

ASAN = os.environ.get("KVCACHE_TEST_ASAN") == "1"
# vptr needs the classes of torch's libraries.
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize=vptr"]


@functools.cache
def emulated_ops():
    """The namespace of the emulated ops; built once per state of csrc, with sanitizers where asked."""
    torch.ops.load_library(str(build_library(ASAN)))
    return torch.ops.kvcache_emul


def build_library(asan: bool) -> Path:
    root = REPO / "csrc"
    sources = [*_build.cuda_sources(root), root / "emul" / "library.cpp"]
    flags = ["-O1", "-g1"] if asan else ["-O2"]
    flags += [
        "-std=c++17",
        "-fPIC",
        "-fvisibility=hidden",
        "-Wno-unknown-pragmas",
    ]
    flags += [f"-D{_build.TORCH_TARGET}", f"-isystem{_build.torch_dir() / 'include'}", f"-I{root}"]
    # Misaligned accesses end a launch with an exception: csrc/emul/alignment.h.
    flags += ["-fsanitize=alignment", "-fno-sanitize-recover=all"]
    flags += [*SANITIZE, "-fno-omit-frame-pointer"] if asan else []
    folder = REPO / "build" / "emul" / _key(root, flags)
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libkvcache_emul.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            objects = [folder / f"{source.name}.o" for source in sources]
            commands = [
                [_build.cxx(), *flags, "-x", "c++", "-c", str(source), "-o", str(obj)]
                for source, obj in zip(sources, objects, strict=True)
            ]
            with ThreadPoolExecutor() as pool:
                list(pool.map(functools.partial(subprocess.run, check=True), commands))
            link = [_build.cxx(), "-shared", *map(str, objects), "-o", str(folder / "out.so")]
            link += SANITIZE if asan else []
            link += [f"-L{_build.torch_dir() / 'lib'}", "-ltorch_cpu"]
            subprocess.run(link, check=True)
            (folder / "out.so").rename(library)
    return library


def _key(root: Path, flags: list[str]) -> str:
    digest = hashlib.sha256("\0".join([*flags, torch.__version__]).encode())
    paths = [*(root / "ops").iterdir(), *(root / "emul").iterdir()]
    for path in sorted(path for path in paths if path.is_file()):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
