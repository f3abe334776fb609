# SPDX-License-Identifier: Apache-2.0
"""Host memory for the pages that kvcache's prefix cache evicts in SGLang."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from kvcache import BlockPool


def page_tensors(pool: Any, page_size: int) -> list[torch.Tensor]:
    """Return the tensors of a KV pool as [pages, page size, ...].

    Raises:
        ValueError: The pool's type is not supported.
    """
    if type(pool) not in (MHATokenToKVPool, MLATokenToKVPool):
        raise ValueError(f"KV pool {type(pool).__name__}: not supported by kvcache's host tier")
    is_mla = type(pool) is MLATokenToKVPool
    if getattr(pool, "k_scale_buffer", None) is not None:
        raise ValueError("KV pool with scales: not supported by kvcache's host tier")
    if not is_mla and pool.kv_cache_layout != "nhd":
        raise ValueError(
            f"KV pool layout {pool.kv_cache_layout}: expected nhd for kvcache's host tier"
        )
    tensors = pool.kv_buffer if is_mla else [*pool.k_buffer, *pool.v_buffer]
    counts = [len(each) // page_size for each in tensors]
    return [each[: n * page_size].unflatten(0, (n, page_size)) for each, n in zip(tensors, counts)]


class HostTier:
    """Copies of evicted pages in host memory. The least recently used copy is dropped first.

    Args:
        tensors: The device tensors, [pages, page size, ...].
        num_pages: Number of pages in host memory.
        after_forward: Returns a context in which work on the device follows the forward passes in
            flight, which may still write to the pages.
    """

    def __init__(
        self,
        tensors: list[torch.Tensor],
        num_pages: int,
        after_forward: Callable[[], AbstractContextManager],
    ) -> None:
        self._device, self._after_forward = tensors, after_forward
        self._host = [
            torch.empty((num_pages + 1, *each.shape[1:]), dtype=each.dtype, pin_memory=each.is_cuda)
            for each in tensors
        ]
        self._num_pages, self._page_size = num_pages, tensors[0].shape[1]
        self.reset()

    def reset(self) -> None:
        """Drop all copies."""
        self.pool = BlockPool(self._num_pages + 1)

    def find(self, hashes: np.ndarray) -> np.ndarray:
        """Return the copies of the first pages, up to the first page that has none."""
        found = self.pool.lookup(hashes)
        return found[: np.count_nonzero(found >= 0)]

    def write(self, pages: np.ndarray, hashes: np.ndarray) -> None:
        """Copy device pages that have no copy yet, of which the last are the most valuable."""
        is_new = self.pool.lookup(hashes, prefix=False) < 0
        pages, hashes = pages[is_new], hashes[is_new]
        first = max(len(pages) - self.pool.num_free, 0)
        pages, hashes = pages[first:], hashes[first:]
        copies = self.pool.allocate(len(pages))
        where, pages = torch.from_numpy(copies).long(), torch.from_numpy(pages).long()
        with self._after_forward():
            for device, host in zip(self._device, self._host):
                host[where] = device[pages.to(device.device)].cpu()
        self.pool.publish(copies, hashes, is_chain=False)
        self.pool.release(copies)

    def read(self, copies: np.ndarray, pages: np.ndarray) -> None:
        """Copy held copies to device pages."""
        where, pages = torch.from_numpy(copies).long(), torch.from_numpy(pages).long()
        with self._after_forward():
            for device, host in zip(self._device, self._host):
                device[pages.to(device.device)] = host[where].to(device.device)

    # SGLang's metrics read these names.

    @property
    def logical_size(self) -> int:
        """The size in tokens."""
        return self._num_pages * self._page_size

    def available_size(self) -> int:
        """Return the number of tokens without a copy."""
        return (self._num_pages - self.pool.num_cached) * self._page_size
