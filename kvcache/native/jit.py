# SPDX-License-Identifier: Apache-2.0
"""Builds the native libraries at first use if no prebuilt libraries are found.

Libraries are built in `$KVCACHE_JIT_DIR` (default: `~/.cache/kvcache`), in a folder that is named by a
hash of sources, flags and versions. All processes share these builds, and a file lock prevents
concurrent builds. Folders that other users can write to are rejected.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import platform
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from kvcache.native import build, compiler


class BuildError(ImportError):
    """Raised if a native library is missing and could not be built. The message says what to do."""


def build_core() -> ModuleType:
    """Compile and import kvcache._core, which needs a compiler and pybind11, but no torch."""
    root = _sources()
    file = f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
    library = _cached("_core", file, root, build.core_sources(root))
    spec = importlib.util.spec_from_file_location("kvcache._core", library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["kvcache._core"] = module
    return module


def build_ops(name: str) -> Path:
    """Build `libkvcache_cpu` or `libkvcache_cuda` with torch, and register its ops."""
    import torch

    root = _sources()
    facts, archs = [torch.__version__, str(torch.version.cuda)], []
    if name == "libkvcache_cpu":
        sources = build.cpu_sources(root)
    else:
        _require_cuda()
        sources = build.cuda_sources(root)
        capabilities = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
        archs = [f"{major}{minor}" for major, minor in sorted(set(capabilities))]
        facts += [*archs, os.environ.get("KVCACHE_CUDA_ARCHS", "")]
    library = _cached(name, f"{name}.so", root, sources, facts, archs)
    torch.ops.load_library(str(library))  # loading a file twice registers its ops only once
    return library


def _require_cuda() -> None:
    """Check that there is a CUDA device and, if the library is not built yet, that nvcc is found."""
    import torch

    if not torch.cuda.is_available():
        _require_nvcc()
        raise BuildError(
            "torch finds no CUDA device to build for: run on a machine with one, or build without one by "
            f"`KVCACHE_CUDA=1 {build.INSTALL_HINT}`"
        )


def _require_nvcc() -> None:
    if build.cuda_home() is None:
        raise BuildError(
            "no nvcc found (in CUDA_HOME, in /usr/local/cuda, on the PATH): install a CUDA toolkit; "
            f"the library is then built at first use, or by `{build.INSTALL_HINT}`"
        )


def _sources() -> Path:
    root = build.source_root()
    if root is None:
        raise BuildError(
            "kvcache has neither built libraries nor its sources: reinstall it, "
            f"from a checkout by `{build.INSTALL_HINT}`"
        )
    return root


def _cached(
    name: str,
    file: str,
    root: Path,
    sources: Sequence[Path],
    facts: Sequence[str] = (),
    archs: Sequence[str] = (),
) -> Path:
    """Return the path of a library, which is built in a folder for these sources and `facts`."""
    base = _base_folder()
    folder = base / f"{name}-{_key(root, facts)}"
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(base)
        folder.mkdir(mode=0o700, exist_ok=True)
        _check_private(folder)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise BuildError(f"cannot write {folder} ({error}): set KVCACHE_JIT_DIR") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            try:
                _check_requirements(name)
                _write(f"no built {name} found, building it in {folder} ...")
                progress = compiler.BuildProgress(len(compiler.units(sources)) + 1, _write)
                compiler.build_library(name, sources, root, folder, folder / file, progress, archs)
            except RuntimeError as error:
                raise BuildError(f"building {name} failed: {error}") from error
            except KeyboardInterrupt:
                _write("interrupted: the next use continues the build")
                raise
            (folder / "complete").touch()
    return folder / file


def _check_requirements(name: str) -> None:
    build.cxx_command()
    if name == "_core":
        build.pybind11_include()
        build.python_include()
    elif name == "libkvcache_cuda":
        _require_nvcc()


def _write(line: str) -> None:
    print(f"kvcache: {line}", file=sys.stderr)


def _base_folder() -> Path:
    asked = os.environ.get("KVCACHE_JIT_DIR")
    if asked:
        return Path(asked)
    try:
        return Path.home() / ".cache" / "kvcache"
    except RuntimeError as error:
        raise BuildError(
            "there is no home folder to build in (HOME is not set): set KVCACHE_JIT_DIR to a folder"
        ) from error


def _check_private(folder: Path) -> None:
    """Raise BuildError if other users can write to the folder, whose code is executed."""
    found = folder.stat()
    if found.st_uid not in (os.geteuid(), 0):
        raise BuildError(
            f"{folder} belongs to user {found.st_uid}, not user {os.geteuid()}: expected a folder "
            "of the current user, because its files are executed; set KVCACHE_JIT_DIR"
        )
    if found.st_mode & 0o022:
        raise BuildError(
            f"{folder} has mode {found.st_mode & 0o777:o}: expected a mode in which only its owner "
            "may write, "
            f"because its files are executed; `chmod go-w {folder}`, or set KVCACHE_JIT_DIR"
        )


def _key(root: Path, facts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    parts = [*facts, sys.version, platform.machine(), os.environ.get("CXX", "")]
    parts += [*build.CXX_FLAGS, *build.NVCC_FLAGS, str(root)]
    digest.update("\0".join(parts).encode())
    for path in sorted(p for p in root.rglob("*") if p.suffix in {".h", ".cpp", ".cu"}):
        if "tests" not in path.parts:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
