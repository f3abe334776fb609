# SPDX-License-Identifier: Apache-2.0
"""The architectures for which the CUDA library is compiled, depending on the toolkit."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from kvcache.native import build
from tests.machinery.shared import REPO

CUDA_12_6 = ("50", "52", "60", "70", "75", "80", "86", "87", "89", "90")


@pytest.fixture
def toolkit(tmp_path, monkeypatch):
    """Create a fake toolkit whose nvcc reports these architectures."""

    def make(archs):
        nvcc = tmp_path / "bin" / "nvcc"
        nvcc.parent.mkdir(exist_ok=True)
        lines = "".join(f"echo compute_{arch}\n" for arch in archs)
        nvcc.write_text(f'#!/bin/sh\n[ "$*" = --list-gpu-arch ] || exit 1\n{lines}')
        nvcc.chmod(0o755)
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        monkeypatch.delenv("KVCACHE_CUDA_ARCHS", raising=False)
        build.toolkit_archs.cache_clear()
        return tmp_path

    yield make
    build.toolkit_archs.cache_clear()


def test_older_toolkit_compiles_for_its_supported_architectures(toolkit):
    toolkit(CUDA_12_6)
    assert build.gencode_flags() == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_90,code=compute_90",
    ]
    toolkit(["75", "80", "90", "100", "120"])
    assert build.cuda_archs() == ["80", "90", "100"]


def test_cmake_uses_the_same_architectures(toolkit):
    toolkit(CUDA_12_6)
    script = str(REPO / "kvcache" / "native" / "build.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "80-real;90"
    assert "kvcache/native/build.py" in (REPO / "CMakeLists.txt").read_text()


def test_library_is_compiled_for_the_devices_present(toolkit):
    toolkit(CUDA_12_6)
    assert build.cuda_archs(["89", "90"]) == ["89", "90"]
    assert build.cuda_archs(["103"]) == ["90"]  # newer devices compile the PTX at load time
    with pytest.raises(
        RuntimeError, match=r"compiles for 50, .* 90: expected one of 37; set CUDA_H"
    ):
        build.cuda_archs(["37"])


def test_requested_architecture_must_exist(toolkit, monkeypatch):
    folder = toolkit(CUDA_12_6)
    monkeypatch.setenv("KVCACHE_CUDA_ARCHS", "90a,80;")
    assert build.cuda_archs(["89"]) == ["90a", "80"]
    monkeypatch.setenv("KVCACHE_CUDA_ARCHS", "80;100")
    with pytest.raises(
        RuntimeError, match=r"KVCACHE_CUDA_ARCHS has 100: expected .* toolkit in"
    ) as e:
        build.gencode_flags()
    assert str(folder) in str(e.value) and "or a newer toolkit" in str(e.value)


def test_toolkit_that_lists_no_architectures_is_reported(toolkit):
    folder = toolkit([])
    with pytest.raises(RuntimeError, match=r"nvcc --list-gpu-arch failed"):
        build.toolkit_archs(folder)


ASYNC_COPY = """
#include "ops/async_copy.h"
__global__ void kernel(const uint4* from, uint4* to) {
  __shared__ uint4 moved[32];
  kvcache::async_copy(moved + threadIdx.x, from + threadIdx.x);
  kvcache::async_copy_commit();
  kvcache::async_copy_wait<0>();
  to[threadIdx.x] = moved[threadIdx.x];
}
"""


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "is_asynchronous"), [("75", False), ("80", True)])
def test_asynchronous_copies_compile_for_architectures_without_them(
    tmp_path, arch, is_asynchronous
):
    home = build.cuda_home()
    if home is None or arch not in build.toolkit_archs(home):
        pytest.skip(f"no nvcc that compiles for sm_{arch}")
    source, ptx = tmp_path / "kernel.cu", tmp_path / "kernel.ptx"
    source.write_text(ASYNC_COPY)
    nvcc = [str(home / "bin" / "nvcc"), "-std=c++17", f"-I{REPO / 'csrc'}"]
    for out, kind in ((ptx, "-ptx"), (tmp_path / "kernel.cubin", "-cubin")):
        command = [*nvcc, f"-arch=sm_{arch}", kind, "-o", str(out), str(source)]
        subprocess.run(command, check=True)
    assert ("cp.async" in ptx.read_text()) == is_asynchronous


RUNTIMES = {
    "an installer": ("lib64/libcudart.so", "lib64/libcudart.so.12"),
    "a distribution": (f"targets/{platform.machine()}-linux/lib/libcudart.so",),
    "conda": ("lib/libcudart.so", "lib64/libcupti.so"),
    "wheels of pip": ("lib/libcudart.so.13",),
    "wheels of two releases": ("lib/libcudart.so.13", "lib/libcudart.so.9"),
    "a static library beside wheels": ("lib/libcudart.so.13", "lib64/libcudart_static.a"),
}


@pytest.mark.parametrize("name", RUNTIMES)
def test_runtime_is_linked_from_the_toolkit(tmp_path, name):
    """Uses the real linker: `main` calls a function that is defined only in the fake runtime
    library.
    """
    home, scratch = tmp_path / "cuda", tmp_path / "scratch"
    code, expected = tmp_path / "runtime.c", home / RUNTIMES[name][0]
    code.write_text("int cudaFake(void) { return 7; }\n")
    for file in RUNTIMES[name]:
        (home / file).parent.mkdir(parents=True, exist_ok=True)
        shared = ["g++", "-xc", "-shared", str(code), f"-Wl,-soname,{Path(file).name}"]
        subprocess.run([*shared, "-o", str(home / file)], check=True)
    main = tmp_path / "main.c"
    main.write_text("int cudaFake(void); int main(void) { return cudaFake(); }\n")
    flags = [f"-L{build.cudart_folder(home, scratch)}", "-lcudart"]
    program = tmp_path / "main"
    subprocess.run(["g++", "-xc", str(main), "-o", str(program), *flags], check=True)
    done = subprocess.run([program], env={"LD_LIBRARY_PATH": str(expected.parent)})
    assert done.returncode == 7


def test_toolkit_without_the_runtime_is_reported(tmp_path):
    with pytest.raises(
        RuntimeError, match=rf"no libcudart\.so in {tmp_path}: .*lib64, .*CUDA_HOME"
    ):
        build.cudart_folder(tmp_path, tmp_path / "scratch")


@pytest.mark.slow
@pytest.mark.parametrize(("archs", "is_dependent"), [(["80"], False), (["80", "90"], True)])
def test_only_libraries_with_code_for_sm_90_launch_dependents(tmp_path, archs, is_dependent):
    """A driver compiles the PTX of sm_80 for newer devices, where its kernels do not wait for the
    previous kernel.
    """
    if build.cuda_home() is None:
        pytest.skip("no nvcc")
    source = """
        #include "ops/dependent_launch.h"
        static_assert(kvcache::has_waiting_code() == (EXPECTED != 0));
    """
    (tmp_path / "check.cu").write_text(source)
    flags = [f"-gencode=arch=compute_{arch},code=compute_{arch}" for arch in archs]
    command = [
        str(build.cuda_home() / "bin" / "nvcc"), "-std=c++17", f"-D{build.TORCH_TARGET}", "-isystem",
        str(build.torch_dir() / "include"), f"-I{build.source_root()}", "-DUSE_CUDA", *flags,
        f"-DEXPECTED={int(is_dependent)}", "-c", str(tmp_path / "check.cu"), "-o",
        str(tmp_path / "check.o"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
