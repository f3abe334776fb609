"""Builds kvcache._core (pybind11, no torch) and the op libraries (LibTorch stable ABI).

torch is located but never imported. The CUDA library is built if torch is a CUDA build and nvcc is
found. KVCACHE_CUDA=0 or 1 overrides this. KVCACHE_CUDA_ARCHS selects the architectures (default
"80;90;100", as far as the toolkit supports them), and CXX selects the compiler.
"""

import importlib.util
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
_spec = importlib.util.spec_from_file_location("_build", HERE / "kvcache" / "native" / "build.py")
build = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(build)

ROOT = Path("csrc")


class Native(Extension):
    """A library built by the compiler calls below.

    The last part of `name` is the name of the file.
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
        if build.cuda_home() is None:
            raise RuntimeError("KVCACHE_CUDA=1, but no nvcc was found: set CUDA_HOME")
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

    def build_extension(self, extension):
        name = extension.name.split(".")[-1]
        out = Path(self.get_ext_fullpath(extension.name))
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(self.build_temp) / name
        folder.mkdir(parents=True, exist_ok=True)
        sources = [Path(source) for source in extension.sources]
        objects = [folder / build.object_name(source) for source in sources]
        commands = [compile_command(s, o, name) for s, o in zip(sources, objects, strict=True)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(self.spawn, commands))
        self.spawn(link_command(objects, out, name, folder))


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


setup(
    ext_modules=list(extensions()),
    cmdclass={"build_ext": BuildNative, "build_py": BuildPackage},
)
