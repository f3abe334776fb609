"""What the compiler's machine code allows of each kernel's launches: read by cuobjdump for the runtime.

Registers, static shared memory, and the threads per block of `__launch_bounds__`, which a launch must
not exceed on a device and which the emulator does not know.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_TRITON = "backends/nvidia/bin/cuobjdump"  # in the folder of the package
_RESERVED_SHARED = (
    1024  # of the system; in the figure of a kernel that has shared memory, from sm_90 on
)
_MOST_THREADS = 1024
_FUNCTION = re.compile(r"^ *Function (\w+):")
_USAGE = re.compile(r"\bREG:(\d+).*\bSHARED:(\d+)")
_SECTION = re.compile(r"^\.nv\.info\.(\w+)")


@dataclass(frozen=True)
class Limits:
    """Of one kernel entry, by its mangled name."""

    kernel: str
    registers: int  # per thread
    static_shared_bytes: int
    max_threads: int  # per block


def find_cuobjdump(home: Path | None, environment: Path) -> str | None:
    """The program's path: $CUOBJDUMP, the toolkit's, the PATH's, or the one that triton carries, here or
    in a virtual environment (a CUDA build of torch brings triton)."""
    places = [os.environ.get("CUOBJDUMP"), shutil.which("cuobjdump")]
    if home is not None:
        places.insert(1, home / "bin" / "cuobjdump")
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        places.append(Path(triton.origin).parent / _TRITON)
    places += environment.glob(f"lib/python*/site-packages/triton/{_TRITON}")
    return next((str(place) for place in places if place and Path(place).is_file()), None)


def limits_of(tool: str, library: Path, arch: str) -> list[Limits]:
    """The limits of all kernels in a library; RuntimeError where it has none for the architecture."""

    def output(option: str) -> str:
        command = [tool, option, "-arch", arch, str(library)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    found = parse(output("-res-usage"), output("-elf"))
    if not found:
        raise RuntimeError(f"{tool} finds no kernel of {arch} in {library}")
    return found


def parse(usage: str, elf: str) -> list[Limits]:
    """From what `cuobjdump -res-usage` and `cuobjdump -elf` print."""
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
    """Threads per block of each kernel that has `__launch_bounds__`."""
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
    """For KVCACHE_GPULESS_LIMITS."""
    lines = (f"{x.kernel} {x.registers} {x.static_shared_bytes} {x.max_threads}\n" for x in limits)
    path.write_text("".join(lines))
