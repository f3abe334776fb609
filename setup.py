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

import logging
import os
import shutil
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from kvcache.native import build, compiler  # noqa: E402

ROOT = Path("csrc")
# pip deletes its own folder for objects after each build.
OBJECTS = HERE / "build" / "objects"
# Commands that do not compile anything. An isolated environment without torch can run them.
WITHOUT_TORCH = {"sdist", "egg_info", "clean"}


class Native(Extension):
    """A library that is built by `compiler`.

    The last component of `name` is the name of the file.
    """


class BuildNative(build_ext):
    def get_ext_filename(self, name):
        if name.split(".")[-1].startswith("lib"):  # loaded by torch, not imported by Python
            return name.replace(".", os.sep) + ".so"
        return super().get_ext_filename(name)

    def build_extensions(self):
        num_steps = sum(
            1
            if self.prebuilt(extension)
            else len(compiler.units(list(map(Path, extension.sources)))) + 1
            for extension in self.extensions
        )
        write = lambda line: self.announce(line, level=logging.INFO)  # noqa: E731 (not with -q)
        self.progress = compiler.BuildProgress(num_steps, write)
        try:
            super().build_extensions()
        except RuntimeError as error:
            raise CompileError(str(error)) from error
        except KeyboardInterrupt:
            write("interrupted: run the same command again to continue")
            raise

    def prebuilt(self, extension):
        return build.prebuilt(Path(self.get_ext_filename(extension.name)).name)

    def build_extension(self, extension):
        name = extension.name.split(".")[-1]
        out = Path(self.get_ext_fullpath(extension.name))
        out.parent.mkdir(parents=True, exist_ok=True)
        if built := self.prebuilt(extension):
            shutil.copy(built, out)
            self.progress.done(f"copy {built}")
            return
        sources = [Path(source) for source in extension.sources]
        compiler.build_library(name, sources, ROOT, OBJECTS / name, out, self.progress)


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
