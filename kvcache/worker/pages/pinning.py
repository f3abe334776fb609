# SPDX-License-Identifier: Apache-2.0
"""Host memory that a device can access. It is mapped at page boundaries and pinned in chunks, in
parallel.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import resource
import time
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

_log = logging.getLogger("kvcache")
_CHUNK_BYTES = 256 << 20
_HUGE_PAGE_BYTES = 2 << 20
_PAGES_PER_STEP = 64  # 64 pages, each a multiple of 64 bytes, end at a system page boundary
_SECONDS_BETWEEN_LOGS = 5.0
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation: too little memory, or too low a lock limit
# Supported by Linux 5.14 and later. Python's mmap module does not define this constant, and its
# `madvise` method does not release the GIL.
_MADV_POPULATE_WRITE = 23
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


def allocate_host(
    num_blocks: int,
    block_bytes: int,
    pin_for: torch.device | None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[torch.Tensor, int, object]:
    """Allocate host memory, pinned if `pin_for` is given.

    Pinning is slow, because the operating system touches and locks every page, and each call runs
    in a single thread. Therefore, several threads touch and pin the memory in chunks. If pinning
    fails, a warning is issued and the memory stays pageable.

    Args:
        num_blocks: Number of blocks.
        block_bytes: Bytes per block, a multiple of 64.
        pin_for: The device for which the memory is pinned; without an index, the current one. None:
            the memory is not pinned.
        progress: Called as `progress(done, total)`, in bytes.

    Returns:
        A tuple of the memory, uint8[num_blocks * block_bytes]; the number of blocks per pinned
        chunk (0 for a single chunk); and an owner. Keep the owner alive, because the memory is
        unpinned when the owner is freed.

    Raises:
        MemoryError: The host does not have enough memory.
    """
    total = num_blocks * block_bytes
    check_host_memory(total)
    memory, mapping = _mapped(total)
    if pin_for is None or total == 0:
        return memory, 0, None
    if pin_for.type == "cuda" and pin_for.index is None:
        pin_for = torch.device("cuda", torch.cuda.current_device())
    steps = max(_CHUNK_BYTES // (block_bytes * _PAGES_PER_STEP), 1)
    per_chunk = steps * _PAGES_PER_STEP
    keep = pin(memory, mapping, pin_for, per_chunk * block_bytes, progress)
    return memory, per_chunk if keep else 0, keep


def pin(
    memory: torch.Tensor,
    mapping: mmap.mmap,
    device: torch.device,
    chunk_bytes: int,
    progress: Callable[[int, int], None] | None = None,
) -> object | None:
    """Pin `memory`, a uint8[n] tensor within a mapping, in chunks.

    Returns:
        An owner that unpins the memory when it is freed. None, after a warning, if the memory
        cannot be pinned.
    """
    # Because pinned pages must not move, a fork would immediately copy all of them.
    _advise(mapping, "MADV_DONTFORK")
    try:
        return _Pinned(memory, chunk_bytes, progress or _Logged(), device)
    except _PinningError as error:
        _advise(mapping, "MADV_DOFORK")
        warnings.warn(
            f"{memory.numel() / 2**30:.1f} GiB of host memory could not be pinned; copies will be "
            f"slower: {error}",
            RuntimeWarning,
            stacklevel=4,
        )
        return None


def _mapped(num_bytes: int) -> tuple[torch.Tensor, mmap.mmap | None]:
    """Map a tensor, uint8[num_bytes], that starts at a huge page boundary. The mapping is None for
    0 bytes.

    The tensor's storage also starts at this address, because torch and the ops check a storage's
    first byte to determine whether the storage is pinned. The memory is mapped but not touched. The
    tensor keeps the mapping alive.
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu"), None
    try:
        mapping = mmap.mmap(
            -1, num_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
    except OSError as error:
        raise MemoryError(
            f"this needs {num_bytes / 2**30:,.1f} GiB of host memory: the system refuses to map it "
            f"({error.strerror})"
        ) from error
    _advise(mapping, "MADV_HUGEPAGE")
    # frombuffer must not use torch's default device, which may not be the CPU.
    with torch.device("cpu"):
        start = torch.frombuffer(mapping, dtype=torch.uint8, count=1).data_ptr()
        offset = -start % _HUGE_PAGE_BYTES
        memory = torch.frombuffer(mapping, dtype=torch.uint8, count=num_bytes, offset=offset)
    return memory, mapping


def _advise(mapping: mmap.mmap, name: str) -> None:
    """Call madvise with the named advice if the system supports this advice."""
    if hasattr(mmap, name):
        with contextlib.suppress(OSError):  # the kernel does not support huge pages
            mapping.madvise(getattr(mmap, name))


class _Pinned:
    """Pins memory in chunks on several threads. The memory is unpinned when this object is freed."""

    def __init__(
        self,
        memory: torch.Tensor,
        chunk_bytes: int,
        progress: Callable[[int, int], None],
        device: torch.device,
    ) -> None:
        start, total = memory.data_ptr(), memory.numel()
        chunks = [(start + at, min(chunk_bytes, total - at)) for at in range(0, total, chunk_bytes)]
        pinned: list[int] = []
        # The finalizer references the memory, which must outlive the registration.
        self._finalizer = weakref.finalize(self, _unpin, pinned, device, memory)

        def pin_one(chunk: tuple[int, int]) -> int:
            _register(*chunk, device)
            pinned.append(chunk[0])
            return chunk[1]

        done = 0
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            try:
                for size in pool.map(pin_one, chunks):
                    done += size
                    progress(done, total)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                self._finalizer()
                raise


class _PinningError(Exception):
    """Raised if the system or the device refuses to pin memory."""


def _populate(address: int, num_bytes: int) -> None:
    """Touch all pages in parallel, if the operating system can. The driver would touch them under a
    lock. If there is not enough memory, the later registration fails.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "madvise"):
        libc.madvise(
            ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_int(_MADV_POPULATE_WRITE)
        )


def _register(address: int, num_bytes: int, device: torch.device) -> None:
    # Imported here, because the import builds libraries that are missing, and `host_memory_bytes`
    # does not need them.
    from kvcache.native import load

    problem = load.why_no_cuda()
    if problem is None and device.type != "cuda":
        problem = f"device is {device}: expected a CUDA device"
    if problem:
        raise _PinningError(problem)
    _populate(address, num_bytes)
    # Unlike torch's cudart, the op does not invalidate other threads' graph captures.
    try:
        error = torch.ops.kvcache._host_register(device.index, address, num_bytes)
    except RuntimeError as why:  # the device is not available
        raise _PinningError(str(why)) from why
    if error != 0:
        advice = f". {_advice()}" if error == _OUT_OF_MEMORY else ""
        raise _PinningError(f"cudaHostRegister of {num_bytes} bytes: {_error_text(error)}{advice}")


def _error_text(error: int) -> str:
    cudart = torch.cuda.cudart()
    return f"{cudart.cudaGetErrorString(cudart.cudaError(error))} ({error})"


def _advice() -> str:
    """Return advice to append to the error message when the system refuses to lock memory."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    fewer = "or ask for fewer host pages (pin_memory=False keeps them pageable)"
    if limit == resource.RLIM_INFINITY:
        return f"Locked memory is not limited here: free memory of the host, {fewer}"
    return (
        f"The limit of locked memory is {limit / 2**20:,.1f} MiB (`ulimit -l`): raise it "
        f"(`ulimit -l unlimited`, `docker run --ulimit memlock=-1`, LimitMEMLOCK=infinity), {fewer}"
    )


def _unpin(addresses: list[int], device: torch.device, _: torch.Tensor) -> None:
    for address in addresses:
        error = torch.ops.kvcache._host_unregister(device.index, address)
        if error != 0:
            _log.warning("cudaHostUnregister of %#x: %s", address, _error_text(error))


class _Logged:
    """Logs progress every few seconds."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _SECONDS_BETWEEN_LOGS

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() >= self._next:
            _log.info("pinned %.1f of %.1f GiB of host memory", done / 2**30, total / 2**30)
            self._next = time.monotonic() + _SECONDS_BETWEEN_LOGS


def host_memory_bytes() -> int | None:
    """Return the bytes of the host's or the container's memory, or None if they are unknown."""
    limits = []
    if "SC_PHYS_PAGES" in os.sysconf_names:
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with contextlib.suppress(OSError, ValueError):  # no limit ("max"), or no container
        limits.append(int(_CONTAINER_LIMIT.read_text()))
    return min(limits, default=None)


def check_host_memory(num_bytes: int) -> None:
    """Raise MemoryError if the memory of the host or the container is smaller than `num_bytes`."""
    limit = host_memory_bytes()
    if limit is not None and num_bytes > limit:
        raise MemoryError(
            f"this needs {num_bytes / 2**30:,.1f} GiB: "
            f"expected at most the {limit / 2**30:,.1f} GiB that the host has"
        )
