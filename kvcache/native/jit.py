# SPDX-License-Identifier: Apache-2.0
"""Builds the native libraries at first use if no prebuilt libraries are found.

Libraries are built in `$KVCACHE_JIT_DIR` (default: `~/.cache/kvcache`), in a folder that is named by a
hash of sources, flags and versions. All processes share these builds, and a file lock prevents
concurrent builds. Folders that other users can write to are rejected.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

from kvcache.native import build


class BuildError(ImportError):
    """Raised if a native library is missing and could not be built.

    The message explains how to fix the problem.
    """


def build_core() -> ModuleType:
    """Compile and import kvcache._core.

    Requires a C++ compiler and pybind11's headers, but not torch.
    """
    root = _sources()
    sources = build.core_sources(root)
    suffix = sysconfig.get_config_var("EXT_SUFFIX")

    def compile_into(folder: Path) -> None:
        compiler = build.cxx_command()
        flags = [
            *build.CXX_FLAGS,
            f"-I{root}",
            f"-isystem{build.pybind11_include()}",
            f"-isystem{build.python_include()}",
        ]
        objects = [str(folder / build.object_name(source)) for source in sources]
        _say_building("_core", folder)
        commands = [
            [*compiler, *flags, "-c", str(source), "-o", obj]
            for source, obj in zip(sources, objects)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_compile_core, commands))
        out = str(folder / f"_core{suffix}")
        _compile_core([*compiler, "-shared", *objects, "-o", out, *build.link_flags()])

    library = _cached("_core", f"_core{suffix}", root, [], compile_into)
    spec = importlib.util.spec_from_file_location("kvcache._core", library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["kvcache._core"] = module
    return module


def _compile_core(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"building kvcache._core failed: {' '.join(command)}\n{done.stderr}")


def build_ops(name: str) -> Path:
    """Build `libkvcache_cpu` or `libkvcache_cuda` with torch, and register its ops."""
    import torch

    root = _sources()
    cuda = name == "libkvcache_cuda"
    sources = build.cuda_sources(root) if cuda else build.cpu_sources(root)
    facts = [torch.__version__, str(torch.version.cuda)]
    present: list[str] = []
    if cuda:
        _require_cuda()
        capabilities = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
        present = [f"{major}{minor}" for major, minor in sorted(set(capabilities))]
        facts += [*present, os.environ.get("KVCACHE_CUDA_ARCHS", "")]

    def compile_into(folder: Path) -> None:
        from torch.utils import cpp_extension

        if cuda:
            _require_nvcc()
            # torch derives the toolkit's folder from an nvcc on the PATH, even if this nvcc is a
            # link (/usr/local/bin) and the libraries are elsewhere.
            cpp_extension.CUDA_HOME = str(build.cuda_home())
        _require_ninja()
        arguments = build.cxx_arguments()
        libraries = []
        if cuda:  # torch searches only lib64 and lib, and only for the name without a version
            libraries.append(f"-L{build.cudart_folder(build.cuda_home(), folder)}")
        cuda_flags = ["-O3", "-DUSE_CUDA", f"-D{build.TORCH_TARGET}"] if cuda else []
        cuda_flags += build.gencode_flags(present) if cuda else []  # otherwise torch adds its own
        with _cxx_for_torch():
            _say_building(name, folder)
            cpp_extension.load(
                name=name,
                sources=[str(source) for source in sources],
                extra_cflags=[*arguments, *build.CXX_FLAGS, f"-D{build.TORCH_TARGET}"],
                extra_cuda_cflags=cuda_flags,
                extra_ldflags=[*arguments, *libraries],
                extra_include_paths=[str(root)],
                build_directory=str(folder),
                with_cuda=cuda,
                is_python_module=False,
            )

    library = _cached(name, f"{name}.so", root, facts, compile_into)
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


@contextlib.contextmanager
def _cxx_for_torch() -> Iterator[None]:
    """Make torch use the selected compiler.

    By default, torch interprets $CXX as the name of a single program, or uses c++.
    """
    asked = os.environ.get("CXX")
    os.environ["CXX"] = build.cxx()
    try:
        yield
    finally:
        if asked is None:
            del os.environ["CXX"]
        else:
            os.environ["CXX"] = asked


def _sources() -> Path:
    root = build.source_root()
    if root is None:
        raise BuildError(
            "kvcache has neither built libraries nor its sources: reinstall it, "
            f"from a checkout by `{build.INSTALL_HINT}`"
        )
    return root


def _require_ninja() -> None:
    # pip installs ninja next to the interpreter, which may not be on the PATH.
    beside = str(Path(sys.executable).parent)
    if beside not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), beside])
    if shutil.which("ninja") is None:
        raise BuildError(
            "torch.utils.cpp_extension needs ninja, which is not installed: `pip install ninja`, "
            f"or build ahead of time by `{build.INSTALL_HINT}`"
        )


def _cached(
    name: str, file: str, root: Path, facts: list[str], compile_into: Callable[[Path], None]
) -> Path:
    """Return the path of `file`. If the file is missing, build it in a separate folder."""
    base = _base_folder()
    folder = base / f"{name}-{_key(root, facts)}"
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(base)
        folder.mkdir(mode=0o700, exist_ok=True)
        _check_private(folder)
        # The lock is next to the folder, because torch's builder keeps a file with this name in the
        # folder.
        lock = folder.with_suffix(".lock").open("w")
    except OSError as error:
        raise BuildError(f"cannot write {folder} ({error}): set KVCACHE_JIT_DIR") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            # torch would wait indefinitely for a killed build. The file lock proves that no build
            # is running.
            (folder / "lock").unlink(missing_ok=True)
            try:
                compile_into(folder)
            except BuildError:
                raise
            except RuntimeError as error:  # an error of `native.build` or of torch
                raise BuildError(f"building {name} failed: {error}") from error
            (folder / "complete").touch()
    return folder / file


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
    """Raise BuildError if users other than the current user and root can write to the folder, because
    code in this folder is executed.
    """
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


def _say_building(name: str, folder: Path) -> None:
    print(f"kvcache: no built {name} found, building it in {folder} ...", file=sys.stderr)


def _key(root: Path, facts: list[str]) -> str:
    digest = hashlib.sha256()
    parts = [*facts, sys.version, platform.machine(), os.environ.get("CXX", "")]
    parts += [*build.CXX_FLAGS, *build.NVCC_FLAGS, str(root)]
    digest.update("\0".join(parts).encode())
    for path in sorted(p for p in root.rglob("*") if p.suffix in {".h", ".cpp", ".cu"}):
        if "tests" not in path.parts:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
