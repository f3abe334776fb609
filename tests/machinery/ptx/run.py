# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels to PTX, and runs operators whose launches are interpreted."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import subprocess
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from kvcache import ops
from kvcache.native import build
from tests.machinery import emulation
from tests.machinery.ptx.machine import Machine
from tests.machinery.ptx.program import Kernel, parse
from tests.machinery.ptx.translate import Code


class _Launch(ctypes.Structure):
    """`emul::Launch` in tools/cuda_emulator/emul/launch.h."""

    _fields_ = (
        ("kernel", ctypes.c_char_p),
        *((name, ctypes.c_uint * 3) for name in ("grid", "block")),
        ("cluster", ctypes.c_uint),
        ("is_dependent", ctypes.c_bool),
        *((name, ctypes.c_size_t) for name in ("dynamic_shared_bytes", "parameter_bytes")),
        ("address", ctypes.c_void_p),
    )


_HOOK = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Launch))
_FP8 = {"2": "e5m2", "3": "e4m3"}  # by the number of mantissa bits


def compiled_kernels() -> dict[str, Kernel]:
    """Return the kernels for sm_90 by demangled name. Compiles files that have changed."""
    root = build.source_root()
    flags = [*build.NVCC_FLAGS, f"-D{build.TORCH_TARGET}", "-arch=sm_90", f"-I{root}"]
    flags += ["-isystem", str(build.torch_dir() / "include")]
    headers = sorted((root / "ops").glob("*.h"))
    folder = emulation.REPO / "build" / "ptx"
    folder.mkdir(parents=True, exist_ok=True)

    def compile_one(source: Path) -> str:
        out = folder / f"{source.stem}-{emulation.digest(*flags, source, *headers)}.ptx"
        if not out.exists():
            nvcc, new = build.cuda_home() / "bin" / "nvcc", out.with_suffix(f".{os.getpid()}")
            subprocess.run([str(nvcc), *flags, "-ptx", str(source), "-o", str(new)], check=True)
            new.rename(out)
        return out.read_text()

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        kernels = [
            k for text in pool.map(compile_one, build.cuda_sources(root)) for k in parse(text)
        ]
    return dict(zip(_names([kernel.symbol for kernel in kernels]), kernels, strict=True))


@functools.cache
def _library() -> ctypes.CDLL:
    emulation.emulated_ops()
    return ctypes.CDLL(str(emulation.build_library(emulation.ASAN)))


@functools.cache
def code_of(kernel: Kernel) -> Code:
    return Code(kernel)


def _names(symbols: list[str]) -> list[str]:
    """Return readable names, such as permute_kernel<uint4, true, false>, of kernels and launches."""
    done = subprocess.run(
        ["c++filt"], input="\n".join(symbols), capture_output=True, text=True, check=True
    )
    names = []
    for name in done.stdout.splitlines():
        name = name.removeprefix("emul::Named<&").removeprefix("(")
        name = re.sub(r"\(anonymous namespace\)::|\b(?:kvcache|c10)::|\bvoid ", "", name)
        name = re.sub(r"SmallFloat<unsigned char, (\d)u[^>]*>", lambda m: _FP8[m[1]], name)
        name = re.sub(r"\((\w+)\)(\d+)", r"\1 \2", name)  # (Direction)0 becomes Direction 0
        name = name.partition("(")[0]
        names.append(name.removesuffix(">") if name.count(">") > name.count("<") else name)
    return names


class Interpreter:
    """Stands in for torch.ops.kvcache: runs operators on the CPU and interprets their launches."""

    def __init__(self, kernels: dict[str, Kernel], order: str):
        self.kernels, self.order, self.steps = kernels, order, 0
        self.races: set[str] = set()
        self.transactions: dict[str, Counter] = defaultdict(Counter)  # by kernel
        self.error: Exception | None = None
        self.ranges: dict[int, np.ndarray] = {}
        self.hook = _HOOK(self._launched)

    def __getattr__(self, name: str):
        def call(*arguments):
            storages = [a.untyped_storage() for a in arguments if isinstance(a, torch.Tensor)]
            self.ranges = {
                s.data_ptr(): np.ctypeslib.as_array(
                    (ctypes.c_ubyte * s.nbytes()).from_address(s.data_ptr())
                )
                for s in storages
                if s.nbytes()
            }
            result = getattr(emulation.emulated_ops(), name)(*arguments)
            if self.error:
                raise self.error
            return result

        return call

    def _launched(self, launch) -> None:
        try:
            if not self.error:
                self._run(launch.contents)
        except Exception as error:  # no caller could catch an exception here
            self.error = error

    def _run(self, launch: _Launch) -> None:
        (name,) = _names(["_Z" + launch.kernel.decode()])
        launch.parameters = ctypes.string_at(launch.address, launch.parameter_bytes)
        code = code_of(self.kernels[name])
        if launch.parameter_bytes != code.kernel.parameter_bytes:
            raise RuntimeError(f"{name} takes {code.kernel.parameter_bytes} bytes of parameters")
        machine = Machine(code, launch, self.ranges, self.order)
        try:
            machine.run()
        finally:
            self.steps += machine.steps
            self.races |= machine.accesses.races
            self.transactions[name].update(machine.accesses.transactions)

    @contextmanager
    def active(self, name: str):
        """Make `kvcache.ops` use this interpreter, for the case with this name."""
        library = _library()
        before = ops._ops
        os.environ["KVCACHE_EMUL_DEVICE_IDS"] = str(int("ids on the device" in name))
        library.kv_emul_hook_launches(self.hook)
        ops._ops = self
        try:
            yield
        finally:
            ops._ops = before
            library.kv_emul_hook_launches(None)
            del os.environ["KVCACHE_EMUL_DEVICE_IDS"]
