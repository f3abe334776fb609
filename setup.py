# SPDX-License-Identifier: Apache-2.0
"""Builds kvcache._core (pybind11, no torch) and the op libraries (LibTorch stable ABI).

torch is located but never imported. The CUDA library is built if torch is built with CUDA and nvcc is
found. KVCACHE_CUDA=0 or 1 overrides this. KVCACHE_CUDA_ARCHS selects the architectures (by default,
those of "80;90;100" that the toolkit supports), and CXX selects the compiler. Libraries in the folder
KVCACHE_PREBUILT are copied instead of built.
"""

import sys

if sys.version_info < (3, 10):  # noqa: UP036 (pip checks requires-python only later)
    sys.exit(
        f"kvcache: this is Python {sys.version.split()[0]}: expected 3.10 or newer; create a virtual "
        "environment with a newer Python"
    )

import importlib.util
import logging
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError

HERE = Path(__file__).resolve().parent
_spec = importlib.util.spec_from_file_location("_build", HERE / "kvcache" / "native" / "build.py")
build = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(build)

ROOT = Path("csrc")
# Commands that do not compile anything. An isolated environment without torch can run them.
WITHOUT_TORCH = {"sdist", "egg_info", "clean"}


class Native(Extension):
    """A library that is built by the compiler calls below.

    The last component of `name` is the name of the file.
    """


def compile_command(source: Path, obj: Path, name: str) -> list[str]:
    include = [f"-I{ROOT}", "-c", str(source), "-o", str(obj)]
    if name == "_core":
        include = [
            f"-isystem{build.pybind11_include()}",
            f"-isystem{build.python_include()}",
            *include,
        ]
    else:
        include = [
            f"-D{build.TORCH_TARGET}",
            "-isystem",
            str(build.torch_dir() / "include"),
            *include,
        ]
    if source.suffix == ".cu":
        nvcc = str(build.cuda_home() / "bin" / "nvcc")
        return [nvcc, *build.NVCC_FLAGS, "--threads", "0", *build.gencode_flags(), *include]
    return [*build.cxx_command(), *build.CXX_FLAGS, *include]


def link_command(objects: list[Path], out: Path, name: str, scratch: Path) -> list[str]:
    command = [*build.cxx_command(), "-shared", "-o", str(out), *map(str, objects)]
    command += build.link_flags()
    if name == "_core":
        return command
    command.append(f"-L{build.torch_dir() / 'lib'}")
    if name == "libkvcache_cuda":
        command += ["-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed"]
        command += [f"-L{build.cudart_folder(build.cuda_home(), scratch)}", "-lcudart"]
    return [*command, "-ltorch_cpu"]


class BuildNative(build_ext):
    def get_ext_filename(self, name):
        if name.split(".")[-1].startswith("lib"):  # loaded by torch, not imported by Python
            return name.replace(".", os.sep) + ".so"
        return super().get_ext_filename(name)

    def build_extensions(self):
        self.num_done = 0
        self.num_commands = sum(
            1 if self.prebuilt(extension) else len(extension.sources) + 1
            for extension in self.extensions
        )
        self.lock = Lock()  # with --parallel, several libraries are built at the same time
        super().build_extensions()

    def prebuilt(self, extension):
        return build.prebuilt(Path(self.get_ext_filename(extension.name)).name)

    def build_extension(self, extension):
        name = extension.name.split(".")[-1]
        out = Path(self.get_ext_fullpath(extension.name))
        out.parent.mkdir(parents=True, exist_ok=True)
        if built := self.prebuilt(extension):
            shutil.copy(built, out)
            self.count(f"copy {built}")
            return
        folder = Path(self.build_temp) / name
        folder.mkdir(parents=True, exist_ok=True)
        sources = [Path(source) for source in extension.sources]
        objects = [folder / build.object_name(source) for source in sources]
        commands = [compile_command(s, o, name) for s, o in zip(sources, objects, strict=True)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(self.call, commands, sources))
        self.call(link_command(objects, out, name, folder), f"link {out.name}")

    def call(self, command, subject):
        """Run a compiler, and print what it compiles and its warnings."""
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        if done.returncode != 0:
            raise CompileError(f"{' '.join(command)} failed:\n{done.stdout}")
        self.count(f"{subject}\n{done.stdout}".rstrip())

    def count(self, text):
        with self.lock:
            self.num_done += 1
            # not shown with -q
            self.announce(f"[{self.num_done}/{self.num_commands}] {text}", level=logging.INFO)


class BuildPackage(build_py):
    """Copies csrc into an installed package for the JIT build.

    In a checkout, csrc is next to the package.
    """

    def run(self):
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "kvcache" / "csrc"
            shutil.copytree(
                ROOT, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("tests")
            )


def extensions():
    def native(name, sources):
        return Native(f"kvcache.{name}", [str(source) for source in sources])

    yield native("_core", build.core_sources(ROOT))
    yield native("libkvcache_cpu", build.cpu_sources(ROOT))
    if build.wants_cuda():
        yield native("libkvcache_cuda", build.cuda_sources(ROOT))


def check_requirements():
    """Check all build requirements, so that a missing one is reported in a single line.

    Raises:
        RuntimeError: A requirement is missing.
    """
    build.check_torch()
    build.pybind11_include()
    build.python_include()
    build.cxx_command()
    if build.wants_cuda() and build.prebuilt("libkvcache_cuda.so") is None:
        build.cuda_archs()


def main():
    compiles = not WITHOUT_TORCH & set(sys.argv)
    if compiles:
        try:
            check_requirements()
        except RuntimeError as error:
            sys.exit(f"kvcache: {error}")
    modules = list(extensions()) if compiles else []
    setup(ext_modules=modules, cmdclass={"build_ext": BuildNative, "build_py": BuildPackage})


main()
