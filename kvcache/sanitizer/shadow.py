# SPDX-License-Identifier: Apache-2.0
"""What the slots of one memory hold, who holds its blocks, and the last events of each block."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

NOBODY = -1


class EventKind(IntEnum):
    """What happened to a block."""

    ALLOCATED = 0
    FREED = 1
    WRITTEN = 2
    COPIED = 3
    LOADED = 4
    CLEARED = 5


_EVENT = np.dtype(
    [
        ("kind", np.int8),
        ("medium", np.int8),  # of the source of a copy
        ("group", np.int16),
        ("step", np.int64),
        ("request", np.int64),  # serial number, or NOBODY
        ("position", np.int32),  # first token written, or source block of a copy
    ]
)


class Shadow:
    """The shadow of one memory: the device, or the host tier.

    Slots are numbered `block * stride + offset`, with the largest block size as `stride`. A tag of 0
    means that the slot was never written.
    """

    def __init__(self, num_blocks: int, stride: int, history: int) -> None:
        self.num_blocks, self.stride = num_blocks, stride
        self.tags = np.zeros(num_blocks * stride, np.uint64)
        self.origins = np.zeros(num_blocks * stride, np.int64)  # serial << 32 | position
        self.owners = np.full(num_blocks, NOBODY, np.int16)  # group whose content a block holds
        self.num_holders = np.zeros(num_blocks, np.int32)
        self.holders = np.full(num_blocks, NOBODY, np.int64)  # last request that got the block
        self.is_fresh = np.zeros(num_blocks, bool)  # allocated, and not read since
        self.writers = np.full(num_blocks, NOBODY, np.int64)  # last request that wrote the block
        # Writer and group of the last write, `serial << 8 | group`, or NOBODY after any other event.
        self.stamps = np.full(num_blocks, NOBODY, np.int64)
        self.write_steps = np.full(num_blocks, -1, np.int64)
        self.changed_at = np.zeros(num_blocks, np.int64)  # version of content that was overwritten
        self.last_change = 0
        self._ring = np.zeros((num_blocks, history), _EVENT)
        self._num_events = np.zeros(num_blocks, np.int64)

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory."""
        return sum(each.nbytes for each in vars(self).values() if isinstance(each, np.ndarray))

    def change(self, blocks: np.ndarray, clock: int) -> None:
        """Record that earlier checks of these blocks are no longer valid."""
        self.changed_at[blocks] = self.last_change = clock

    def clear(self, blocks: np.ndarray, clock: int) -> None:
        """Drop the content of blocks."""
        self.tags.reshape(-1, self.stride)[blocks] = 0
        self.owners[blocks] = NOBODY
        self.change(blocks, clock)

    def log(
        self,
        blocks: np.ndarray,
        kind: EventKind,
        step: int,
        requests: np.ndarray | int = NOBODY,
        *,
        group: int = NOBODY,
        positions: np.ndarray | int = 0,
        medium: int = 0,
    ) -> None:
        """Append an event to the history of each block. The oldest event is overwritten."""
        events = np.empty(len(blocks), _EVENT)
        events["kind"], events["medium"], events["group"] = kind, medium, group
        events["step"], events["request"], events["position"] = step, requests, positions
        self._ring[blocks, self._num_events[blocks] % self._ring.shape[1]] = events
        self._num_events[blocks] += 1
        if kind is not EventKind.WRITTEN:
            self.stamps[blocks] = NOBODY

    def events(self, block: int) -> np.ndarray:
        """Return the last events of a block, the oldest first."""
        count, size = int(self._num_events[block]), self._ring.shape[1]
        return self._ring[block, np.arange(max(count - size, 0), count) % size]
