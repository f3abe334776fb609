# SPDX-License-Identifier: Apache-2.0
"""Reads each kernel's launch limits from the compiled machine code with cuobjdump, for the runtime.

The limits are registers, static shared memory, and the threads per block of `__launch_bounds__`. A
launch on a device must not exceed them, and the emulator does not know them.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_TRITON = "backends/nvidia/bin/cuobjdump"  # path inside the triton package
_RESERVED_SHARED = (
    # Bytes of shared memory that the system reserves. From sm_90 on, the reported size of a kernel
    # that uses shared memory includes them.
    1024
)
_MOST_THREADS = 1024
_FUNCTION = re.compile(r"^ *Function (\w+):")
_USAGE = re.compile(r"\bREG:(\d+).*\bSHARED:(\d+)")
_SECTION = re.compile(r"^\.nv\.info\.(\w+)")


@dataclass(frozen=True)
class Limits:
    """Launch limits of one kernel, by mangled name."""

    kernel: str
    registers: int  # registers per thread
    static_shared_bytes: int
    max_threads: int  # maximum number of threads per block


def find_cuobjdump(home: Path | None, environment: Path) -> str | None:
    """Return the path of cuobjdump: from $CUOBJDUMP, the toolkit, PATH, or triton.

    Triton, which is installed with a CUDA build of torch, is looked up in this Python and in
    `environment`.
    """
    places = [os.environ.get("CUOBJDUMP"), shutil.which("cuobjdump")]
    if home is not None:
        places.insert(1, home / "bin" / "cuobjdump")
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        places.append(Path(triton.origin).parent / _TRITON)
    places += environment.glob(f"lib/python*/site-packages/triton/{_TRITON}")
    return next((str(place) for place in places if place and Path(place).is_file()), None)


def limits_of(tool: str, library: Path, arch: str) -> list[Limits]:
    """Return the limits of all kernels in a library.

    Raises RuntimeError if the library has no code for the architecture.
    """

    def output(option: str) -> str:
        command = [tool, option, "-arch", arch, str(library)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    found = parse(output("-res-usage"), output("-elf"))
    if not found:
        raise RuntimeError(f"{tool} finds no kernel of {arch} in {library}")
    return found


def parse(usage: str, elf: str) -> list[Limits]:
    """Parse the output of `cuobjdump -res-usage` and `cuobjdump -elf`."""
    threads = max_threads(elf)
    found, kernel = [], ""
    for line in usage.splitlines():
        if function := _FUNCTION.match(line):
            kernel = function[1]
        elif (resources := _USAGE.search(line)) and kernel:
            registers, shared = map(int, resources.groups())
            static = max(shared - _RESERVED_SHARED, 0)
            found.append(Limits(kernel, registers, static, threads.get(kernel, _MOST_THREADS)))
            kernel = ""
    return found


def max_threads(elf: str) -> dict[str, int]:
    """Return the maximum threads per block of each kernel with `__launch_bounds__`."""
    found: dict[str, int] = {}
    kernel, attribute = None, ""
    for line in elf.splitlines():
        if line.startswith("."):
            section = _SECTION.match(line)
            kernel = section[1] if section else None
        elif "Attribute:" in line:
            attribute = line.split(":", 1)[1].strip()
        elif kernel and attribute == "EIATTR_MAX_THREADS" and "Value:" in line:
            x, y, z = (int(n, 16) for n in line.split(":", 1)[1].split())
            found[kernel] = x * y * z
    return found


def write(limits: list[Limits], path: Path) -> None:
    """Write the file that KVCACHE_GPULESS_LIMITS names."""
    lines = (f"{x.kernel} {x.registers} {x.static_shared_bytes} {x.max_threads}\n" for x in limits)
    path.write_text("".join(lines))
