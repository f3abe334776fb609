# SPDX-License-Identifier: Apache-2.0
"""Keeps the most recent batches for readers that have missed some."""

from __future__ import annotations

from collections import deque


class ReplayBuffer:
    """A buffer of payloads with consecutive sequence numbers, limited in number and in total bytes.

    The oldest payloads are dropped first. The last payload is kept regardless of its size.
    """

    def __init__(self, max_batches: int, max_bytes: int, start: int = 0) -> None:
        self._max_batches, self._max_bytes = max_batches, max_bytes
        self._payloads: deque[bytes] = deque()
        self.start = start  # sequence number of the first payload
        self.first = start  # sequence number of the oldest payload that is kept
        self.num_bytes = 0

    @property
    def stop(self) -> int:
        """The next sequence number."""
        return self.first + len(self._payloads)

    def append(self, payload: bytes) -> None:
        """Add a batch with the sequence number `stop`."""
        self._payloads.append(payload)
        self.num_bytes += len(payload)
        while len(self._payloads) > 1 and (
            len(self._payloads) > self._max_batches or self.num_bytes > self._max_bytes
        ):
            self.num_bytes -= len(self._payloads.popleft())
            self.first += 1

    def __getitem__(self, number: int) -> bytes:
        """Return the batch with this sequence number.

        Raises IndexError if it is not in the buffer.
        """
        if not self.first <= number < self.stop:
            raise IndexError(
                f"batch {number} is not in the buffer: expected {self.first} to {self.stop - 1}"
            )
        return self._payloads[number - self.first]
