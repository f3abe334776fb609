# SPDX-License-Identifier: Apache-2.0
"""Tracks the pages that SGLang's allocator has allocated, and the requests that fill them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from kvcache.sanitizer import Sanitizer
from kvcache_exchange.plugins.guard import ObserverGuard
from kvcache_exchange.plugins.wrapping import wrap_once


class HandedOutPages:
    """Reports allocations and frees of one allocator to a sanitizer.

    A page is held by the request that fills it, until the page is returned to the allocator. Until
    then, the radix cache may share the page with other requests and keep it after the request has
    ended.

    Args:
        sanitizer: The sanitizer.
        guard: Calls the observer.
        group: The sanitized group.
        allocator: SGLang's allocator of this group, for tokens or pages.
        num_pages: Number of the allocator's pages, including page 0.
        first: Block number of page 0. Pages are numbered per group, blocks across all groups.
    """

    def __init__(
        self,
        sanitizer: Sanitizer,
        guard: ObserverGuard,
        group: int,
        allocator: Any,
        num_pages: int,
        first: int,
    ) -> None:
        self._sanitizer, self._guard, self._group, self._first = sanitizer, guard, group, first
        self._allocator, self._size = allocator, allocator.page_size
        self._is_new = np.zeros(num_pages, bool)  # allocated, but not filled yet
        self._holders = np.full(num_pages, None, object)  # names of requests

    def install(self) -> None:
        """Wrap the methods of the allocator."""
        for name in ("alloc", "alloc_extend", "alloc_decode"):
            wrap_once(self._allocator, name, self._allocating)
        is_paged = hasattr(self._allocator, "_release_page_ids")
        wrap_once(self._allocator, "_release_page_ids" if is_paged else "free", self._freeing)
        wrap_once(self._allocator, "clear", self._clearing)

    def blocks(self, slots: np.ndarray) -> np.ndarray:
        """Return the block of each slot. Page 0 is the null block in all groups."""
        pages = slots.astype(np.int64) // self._size
        return np.where(pages > 0, pages + self._first, 0)

    def slots(self, slots: np.ndarray) -> np.ndarray:
        """Convert the allocator's slots to the sanitizer's slots."""
        return self.blocks(slots) * self._size + slots % self._size

    def take(self, name: str, slots: np.ndarray) -> None:
        """Make a request the holder of new pages that it fills."""
        pages = slots // self._size
        pages = np.unique(pages[self._is_new[pages]])
        if len(pages):
            self._is_new[pages] = False
            self._holders[pages] = name
            self._sanitizer.observe_allocation(name, pages + self._first, group=self._group)

    def _allocating(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def alloc(*arguments: Any, **options: Any) -> Any:
            slots = original(*arguments, **options)
            if slots is not None:
                self._guard(self._allocated, slots)
            return slots

        return alloc

    def _freeing(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def free(*indices: Any) -> None:
            if self._allocator.free_group is None:  # otherwise called again when the group ends
                for each in indices:
                    self._guard(self._freed, each)
            original(*indices)

        return free

    def _clearing(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def clear() -> None:
            original()
            self._is_new[:] = False
            self._guard(self._freed, None)

        return clear

    def _allocated(self, slots: Any) -> None:
        slots = slots.cpu().numpy()
        starts = slots[slots % self._size == 0]  # the other slots continue pages in use
        self._is_new[starts // self._size] = True

    def _freed(self, pages: Any) -> None:
        """Observe pages that were returned to the allocator. None: all pages."""
        pages = np.arange(len(self._holders)) if pages is None else pages.cpu().numpy()
        self._is_new[pages] = False
        holders = self._holders[pages]
        self._holders[pages] = None
        for name in dict.fromkeys(holders.tolist()):
            if name is not None:
                blocks = pages[holders == name].astype(np.int64) + self._first
                self._sanitizer.observe_free(name, blocks, group=self._group)
