# SPDX-License-Identifier: Apache-2.0
"""Problem sizes: full sizes on a GPU, scaled down by a common factor in a rehearsal."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from types import ModuleType

from benchmarks.gpu import machine, say

REHEARSAL = os.environ.get("KVCACHE_REHEARSAL") == "1"
FACTOR = 1024
_SHARE_OF_FREE = 0.4  # fraction of the free memory used by one pool


def scaled(size: int, least: int = 1) -> int:
    """Return the size. In a rehearsal, return 1/1024 of it, but at least `least`."""
    return max(size // FACTOR, least) if REHEARSAL else size


def repeats(count: int) -> int:
    """Return the number of repetitions. Returns 1 in a rehearsal, where times are meaningless."""
    return 1 if REHEARSAL else count


def pool_bytes(wanted: int, least: int = 1 << 20, *, on_host: bool = True) -> int:
    """Return the size of a pool that fits into device memory and, if `on_host` is set, into host
    memory.
    """
    import torch

    size = scaled(wanted, least)
    free = [torch.cuda.mem_get_info()[0], *([available_host_bytes()] if on_host else [])]
    room = int(_SHARE_OF_FREE * min(free))
    if room < size:
        size = max(room >> 20 << 20, least)
        say.learned(f"too little memory: a pool of {wanted >> 20:,} MiB is {size >> 20:,} MiB here")
        say.row(shrunk=wanted, to=size)
    return size


def available_host_bytes() -> int:
    """Return the memory available without swapping, limited by the container."""
    return min(_system_bytes(), pinning().host_memory_bytes() or sys.maxsize)


@functools.cache
def pinning() -> ModuleType:
    """Load only pinning.py. Importing the package requires its libraries, which may not be built yet."""
    path = machine.REPO / "kvcache" / "worker" / "pages" / "pinning.py"
    spec = importlib.util.spec_from_file_location("_pinning", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _system_bytes() -> int:
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":") for line in lines)
        return int(fields["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
