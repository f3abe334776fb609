# SPDX-License-Identifier: Apache-2.0
"""Counts the calls that a piece of code makes to the CUDA runtime without a GPU.

    with counted() as counts:
        swap.swap_out(pairs)
    assert counts["copies"] == 0 and counts["batches"] == 1

Counters, see emul/runtime/counters.h: copies (single copies), batches, batched_copies,
pageable_copies, fills, launches (of this project's kernels), legacy_work (on the legacy stream),
waits (waits of the host), event_queries, pointer_queries, device_queries, capture_queries,
allocations.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager


def is_available() -> bool:
    """Whether this process uses the runtime without a GPU. Other runtimes have no counters."""
    return "KVCACHE_GPULESS_RUNTIME" in os.environ


@functools.cache
def _runtime() -> tuple[ctypes.CDLL, tuple[str, ...]]:
    """Return the runtime and the names of its counters."""
    runtime = ctypes.CDLL(os.environ["KVCACHE_GPULESS_RUNTIME"])
    runtime.kvcache_gpuless_counter.restype = ctypes.c_char_p
    runtime.kvcache_gpuless_counter.argtypes = [ctypes.c_size_t]
    runtime.kvcache_gpuless_count.restype = ctypes.c_long
    runtime.kvcache_gpuless_count.argtypes = [ctypes.c_size_t]
    names: list[str] = []
    while (name := runtime.kvcache_gpuless_counter(len(names))) is not None:
        names.append(name.decode())
    return runtime, tuple(names)


def totals() -> dict[str, int]:
    """Return all counters of this process so far, by name."""
    runtime, names = _runtime()
    return {name: runtime.kvcache_gpuless_count(i) for i, name in enumerate(names)}


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Yield a dict that receives the counters' increments at the end of the `with` block."""
    found: dict[str, int] = {}
    before = totals()
    yield found
    after = totals()
    found.update({name: after[name] - before[name] for name in after})
