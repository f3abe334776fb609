# SPDX-License-Identifier: Apache-2.0
"""Compiles and links a native library, for `setup.py` and for the build at first use (`jit`).

Objects stay in a folder, each with a record of what it was compiled from. A later build compiles only
what has changed, so an interrupted build continues where it stopped.

Several source files of a folder are compiled as one unit, because most of the time is spent on the
headers that they share.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from kvcache.native import build

FILES_PER_UNIT = 4  # also in CMakeLists.txt


class BuildProgress:
    """Writes "[2/9] text" for each of the steps of a build."""

    def __init__(self, num_steps: int, write: Callable[[str], None]) -> None:
        self._num_steps, self._write = num_steps, write
        self._num_done = 0
        self._lock = Lock()

    def done(self, text: str) -> None:
        with self._lock:
            self._num_done += 1
            self._write(f"[{self._num_done}/{self._num_steps}] {text}")


def units(sources: Sequence[Path]) -> list[list[Path]]:
    """Group the C++ files of a folder, which are compiled together, and single CUDA files."""
    groups = []
    for (_, kind), each in itertools.groupby(sources, lambda path: (path.parent, path.suffix)):
        files = list(each)
        num_units = -(-len(files) // FILES_PER_UNIT) if kind == ".cpp" else len(files)
        groups += [files[i::num_units] for i in range(num_units)]
    return groups


def build_library(
    name: str,
    sources: Sequence[Path],
    root: Path,
    folder: Path,
    out: Path,
    progress: BuildProgress,
    archs: Sequence[str] = (),
) -> None:
    """Compile what has changed, and link the library. Raises RuntimeError if a compiler fails.

    Args:
        name: ``_core``, ``libkvcache_cpu`` or ``libkvcache_cuda``.
        sources: The library's source files.
        root: The folder ``csrc``.
        folder: Folder for objects, created if needed.
        out: File of the library.
        progress: Receives a step for each unit and one for linking.
        archs: Architectures of the devices that are present (`build.cuda_archs`).
    """
    folder.mkdir(parents=True, exist_ok=True)

    def compile_one(files: list[Path]) -> Path:
        unit = folder / "_".join([*files[0].relative_to(root).parts[:-1], files[0].stem])
        source = files[0]
        if len(files) > 1:
            source = unit.with_suffix(".cpp")
            source.write_text("".join(f'#include "{path.relative_to(root)}"\n' for path in files))
        obj = unit.with_suffix(".o")
        compiler, flags = _compile_command(name, root, source, archs)
        printed = compile_if_changed(compiler, [*flags, "-c", str(source)], obj)
        place = files[0].parent.relative_to(root.parent)
        progress.done(f"{place}: {' '.join(path.name for path in files)}{printed}")
        return obj

    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        objects = list(pool.map(compile_one, units(sources)))
        _run(_link_command(name, objects, out, folder))
    finally:
        pool.shutdown(cancel_futures=True)
    progress.done(f"link {out.name}")


def compile_if_changed(compiler: list[str], flags: list[str], obj: Path) -> str:
    """Compile one source, unless the object is current: the command, the compiler and all files that
    it read are the same.

    Returns the compiler's warnings, or a remark that nothing has changed. Raises RuntimeError if the
    compiler fails.
    """
    command = [*compiler, *flags, "-o", str(obj)]
    made_from = [repr(command), _version(*compiler)]
    record, depends = obj.with_suffix(".made"), obj.with_suffix(".d")
    if obj.exists() and record.exists():
        digest, *files = record.read_text().split("\n")
        if digest == _digest(made_from, files):
            return " (unchanged)"
    record.unlink(missing_ok=True)
    started = time.time()
    printed = _run([*command, "-MD", "-MF", str(depends)])
    files = _dependencies(depends.read_text())
    # A file that was edited meanwhile may have been read before or after that.
    if all(os.stat(path).st_mtime < started for path in files):
        record.write_text("\n".join([_digest(made_from, files), *files]))
    return "\n" + printed if printed else ""


def _dependencies(rule: str) -> list[str]:
    """Return the files in a rule for make: "unit.o: file ...", or "unit.o : file ..." by nvcc."""
    words = shlex.split(rule.replace("\\\n", " "))
    return [word for word in words[1:] if word != ":"]


def _digest(parts: list[str], files: list[str]) -> str:
    digest = hashlib.sha256("\0".join(parts).encode())
    for path in files:
        digest.update(path.encode())
        digest.update(Path(path).read_bytes() if os.path.exists(path) else b"missing")
    return digest.hexdigest()


@functools.cache
def _version(*compiler: str) -> str:
    return _run([*compiler, "--version"])


def _run(command: list[str]) -> str:
    """Run a compiler, and return what it prints."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)}\n{done.stdout}")
    return done.stdout.rstrip()


def _compile_command(
    name: str, root: Path, source: Path, archs: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return the compiler and its flags."""
    flags = [f"-I{root}"]
    if name == "_core":
        flags += [
            "-isystem",
            str(build.pybind11_include()),
            "-isystem",
            str(build.python_include()),
        ]
    else:
        flags += [f"-D{build.TORCH_TARGET}", "-isystem", str(build.torch_dir() / "include")]
    if source.suffix == ".cu":
        nvcc = str(build.cuda_home() / "bin" / "nvcc")
        return [nvcc], [*build.NVCC_FLAGS, "--threads", "0", *build.gencode_flags(archs), *flags]
    return build.cxx_command(), [*build.CXX_FLAGS, *flags]


def _link_command(name: str, objects: list[Path], out: Path, scratch: Path) -> list[str]:
    command = [*build.cxx_command(), "-shared", "-o", str(out), *map(str, objects)]
    command += build.link_flags()
    if name == "_core":
        return command
    command.append(f"-L{build.torch_dir() / 'lib'}")
    if name == "libkvcache_cuda":
        command += ["-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed"]
        command += [f"-L{build.cudart_folder(build.cuda_home(), scratch)}", "-lcudart"]
    return [*command, "-ltorch_cpu"]
