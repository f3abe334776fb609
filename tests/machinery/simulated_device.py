# SPDX-License-Identifier: Apache-2.0
"""A simulated device that runs the work of streams in any order that events permit, so that missing
synchronization leads to wrong bytes.
"""

from __future__ import annotations

import random
from collections import deque


class Event:
    """An event, which completes when its stream reaches it."""

    def __init__(self) -> None:
        self.happened = False

    def query(self) -> bool:
        return self.happened


class SimulatedStreams:
    """A replacement for `worker.swap.streams` in tests. `advance` executes work in a random legal
    order.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._streams: list[deque] = []
        self._speeds: dict[int, int] = {}  # relative speeds, so that some streams lag far behind
        self.compute = self.new_stream()
        self.fails: set[int] = set()  # indices of launches on other streams that must raise
        self.launches = 0
        self.capturing = False  # whether the compute stream is being captured
        self.held: list[deque] = []  # streams whose work does not run

    def new_stream(self) -> deque:
        self._streams.append(deque())
        self._speeds[id(self._streams[-1])] = self._random.choice([1, 10, 100])
        return self._streams[-1]

    def current(self) -> deque:
        return self.compute

    def is_capturing(self) -> bool:
        return self.capturing

    def launch(self, stream, work) -> None:
        if stream is not self.compute:
            self.launches += 1
            if self.launches in self.fails:
                raise RuntimeError("CUDA error: planted")
        stream.append(work)

    def close(self, streams) -> None:
        self.closed = list(streams)

    def record(self, stream) -> Event:
        event = Event()
        stream.append(event)
        return event

    def wait(self, stream, event) -> None:
        stream.append(("wait", event))

    def advance(self, most: int | None = None) -> int:
        """Execute up to `most` items, or all items if `most` is None. Return the number of items
        that are still waiting or queued.
        """
        done = 0
        while most is None or done < most:
            ready = [stream for stream in self._streams if stream and self._is_ready(stream)]
            if not ready:
                break
            item = self._random.choices(ready, [self._speeds[id(stream)] for stream in ready])[
                0
            ].popleft()
            if isinstance(item, Event):
                item.happened = True
            elif not isinstance(item, tuple):
                item()
            done += 1
        return sum(map(len, self._streams))

    def _is_ready(self, stream) -> bool:
        if any(stream is each for each in self.held):
            return False
        return not isinstance(stream[0], tuple) or stream[0][1].happened
