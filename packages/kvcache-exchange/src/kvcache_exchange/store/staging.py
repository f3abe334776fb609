# SPDX-License-Identifier: Apache-2.0
"""Host memory in which values are staged between a store's thread and the cache's pages."""

from __future__ import annotations

import numpy as np

from kvcache.worker import Pages
from kvcache.worker.pages.pinning import allocate_host
from kvcache_exchange.store.value_format import HEADER_BYTES

_CACHE_LINE = 64


class ValueStaging:
    """Values in host memory, which is pinned if the pages are on a GPU. `pages` is a view of the
    values without their headers.

    A value is in use from `take` until `give_back`. Value 0 is not used, because it corresponds to
    page 0, the null block. Raises MemoryError if the host does not have enough memory.
    """

    def __init__(self, like: Pages, num_bytes: int) -> None:
        self.value_bytes = HEADER_BYTES + like.page_bytes
        stride = -(-self.value_bytes // _CACHE_LINE) * _CACHE_LINE
        num_values = max(num_bytes // stride, 2)
        device = like.device if like.device.type == "cuda" else None
        memory, per_chunk, keep = allocate_host(num_values + 1, stride, device)
        self.pages = Pages(
            memory,
            num_values + 1,
            HEADER_BYTES + np.cumsum(like.sizes) - like.sizes,
            np.full(len(like.sizes), stride),
            like.sizes,
            like.layers,
            keep=keep,
            pages_per_chunk=per_chunk,
            formats=like.formats,
            contents=like.contents,
        )
        self.memory = memory.numpy()
        self.values = self.memory.reshape(-1, stride)[:, : self.value_bytes]  # a view
        self._free = list(range(num_values, 0, -1))
        self.num_values = num_values

    @property
    def num_free(self) -> int:
        """Number of free values."""
        return len(self._free)

    def take(self) -> int:
        """Take a free value and return its index. At least one value must be free."""
        return self._free.pop()

    def give_back(self, numbers: list[int]) -> None:
        """Free values."""
        self._free += numbers

    def of(self, numbers: list[int]) -> list[np.ndarray]:
        """Return views of the values, each uint8[value_bytes]."""
        return [self.values[number] for number in numbers]
