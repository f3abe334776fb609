# SPDX-License-Identifier: Apache-2.0
"""Staging memory on the device. One half is filled while the other half is transferred over the bus."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvcache.worker.pages.page_copy import PageCopy
from kvcache.worker.pages.pages import Pages
from kvcache.worker.swap.streams import CpuStreams, CudaStreams


class SwapStaging:
    """Staging memory between `source` and `destination`, divided into two halves, with one stream
    per side.

    A job's chunks alternate between the two halves. Stream `first` copies a chunk into a half, and
    stream `last` copies it from there to the destination. Events ensure that a half is filled only
    after it was emptied, and vice versa. The memory is allocated on the stream that is current at
    construction. It may be freed once both streams have completed their work.
    """

    def __init__(
        self,
        source: Pages,
        destination: Pages,
        memory: Pages,
        first: object,
        last: object,
        streams: CudaStreams | CpuStreams,
    ) -> None:
        self.first, self.last = first, last
        self._into, self._out_of = PageCopy(source, memory), PageCopy(memory, destination)
        self._memory = memory
        self._pages_per_half = memory.num_blocks // 2
        self._streams = streams
        # For each half, the event after which it is empty.
        self._emptied: list[object] = [None, None]
        self._half = 0
        streams.wait(first, streams.record(streams.current()))

    def carry(
        self, pairs: np.ndarray, copy: Callable[[object, PageCopy, np.ndarray], None]
    ) -> object:
        """Launch the copies of all pages with `copy(stream, page_copy, pairs)`.

        Returns:
            The event after which no copy reads the sources.
        """
        read = None
        for at in range(0, len(pairs), self._pages_per_half):
            chunk = pairs[at : at + self._pages_per_half]
            slots = self._half * self._pages_per_half + np.arange(len(chunk))
            self._wait_until_emptied(self._half)
            copy(self.first, self._into, np.stack([chunk[:, 0], slots], 1))
            read = self._streams.record(self.first)
            self._wait_until_filled(read)
            copy(self.last, self._out_of, np.stack([slots, chunk[:, 1]], 1))
            self._emptied[self._half] = self._streams.record(self.last)
            self._half = 1 - self._half
        return read

    def join(self) -> None:
        """Make `last` and each half's next use wait for all copies, after a failed launch."""
        self._wait_until_filled(self._streams.record(self.first))
        self._emptied = [self._streams.record(self.last)] * 2

    def _wait_until_emptied(self, half: int) -> None:
        if self._emptied[half] is not None:
            self._streams.wait(self.first, self._emptied[half])

    def _wait_until_filled(self, event: object) -> None:
        self._streams.wait(self.last, event)
