"""Host memory that a device can reach: pinned in parallel pieces."""

from __future__ import annotations

import logging
import os
import time
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

_log = logging.getLogger("kvcache")
_CHUNK_BYTES = 256 << 20
_PAGES_PER_STEP = 64  # 64 pages of whole cache lines end where a page of the system does
_SECONDS_BETWEEN_LOGS = 5.0


def allocate_host(
    num_blocks: int,
    block_bytes: int,
    pin: bool,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[torch.Tensor, int, object]:
    """uint8[num_blocks * block_bytes] in host memory, blocks per pinned piece (0: one), what to keep.

    Pinning is slow (the system touches and locks every page), and one call does it on one thread:
    pieces are pinned by several. `block_bytes` is a multiple of 64. MemoryError where the host has
    less memory; a warning, and pageable memory, where it cannot be pinned.
    """
    total = num_blocks * block_bytes
    _check_memory(total)
    # Mapped, not touched; it begins where a page of the system does.
    padded = torch.empty(total + 4096, dtype=torch.uint8)
    memory = padded[-padded.data_ptr() % 4096 :][:total]
    if not pin or total == 0:
        return memory, 0, None
    steps = max(_CHUNK_BYTES // (block_bytes * _PAGES_PER_STEP), 1)
    per_chunk = steps * _PAGES_PER_STEP
    try:
        keep = _Pinned(memory, per_chunk * block_bytes, progress or _Logged(total))
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        warnings.warn(
            f"{total / 2**30:.1f} GiB of host memory could not be pinned, swaps will be slower: {error}",
            RuntimeWarning,
            stacklevel=3,
        )
        return memory, 0, None
    return memory, per_chunk, keep


class _Pinned:
    """Pins memory piece by piece on several threads; unpins it when this is let go of."""

    def __init__(
        self, memory: torch.Tensor, chunk_bytes: int, progress: Callable[[int, int], None]
    ) -> None:
        start, total = memory.data_ptr(), memory.numel()
        chunks = [(start + at, min(chunk_bytes, total - at)) for at in range(0, total, chunk_bytes)]
        pinned: list[int] = []
        # The memory must outlive the registration, so the finaliser holds it.
        self._finalizer = weakref.finalize(self, _unpin, pinned, memory)
        device = torch.cuda.current_device()  # also creates the context, once

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


def _register(address: int, num_bytes: int, device: int) -> None:
    flags = 1 | 2  # portable (for all contexts), mapped (kernels reach it)
    with torch.cuda.device(device):
        error = torch.cuda.cudart().cudaHostRegister(address, num_bytes, flags)
    if int(error) != 0:
        raise RuntimeError(f"cudaHostRegister of {num_bytes} bytes: {error}")


def _unpin(addresses: list[int], _: torch.Tensor) -> None:
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)


class _Logged:
    """Progress to the log, every few seconds."""

    def __init__(self, total: int) -> None:
        self._next = time.monotonic() + _SECONDS_BETWEEN_LOGS

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() >= self._next:
            _log.info("pinned %.1f of %.1f GiB of host memory", done / 2**30, total / 2**30)
            self._next = time.monotonic() + _SECONDS_BETWEEN_LOGS


def _check_memory(num_bytes: int) -> None:
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if num_bytes > physical:
        raise MemoryError(
            f"the host's pages need {num_bytes / 2**30:,.1f} GiB: "
            f"expected at most the {physical / 2**30:,.1f} GiB that the host has"
        )
