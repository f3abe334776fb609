# SPDX-License-Identifier: Apache-2.0
"""Assigns the engine's rows to requests fairly, so that large requests do not starve others."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Busy(Exception):
    """Raised if too many requests are already waiting."""


class Admission:
    """Assigns an engine's rows to the prompts of requests. Use an instance from a single event loop
    only.

    The first prompt of each request may use any free row; rows are assigned by priority and then in
    order of arrival. Additional prompts of a request are assigned rows only while less than half of
    the rows are in use, or less than an eighth if other requests use rows. This leaves rows free
    for new requests and keeps steps short, regardless of the number of prompts in other requests.
    """

    def __init__(self, num_rows: int, max_waiting: int) -> None:
        self._num_rows, self._max_waiting = num_rows, max_waiting
        self._num_given = 0
        self._num_requests = 0  # number of requests whose first prompt occupies a row
        self._order = itertools.count()
        # A heap of (priority, number, count, future).
        self._first: list[tuple[int, int, int, asyncio.Future[None]]] = []
        self._further: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._error: Exception | None = None  # error to raise for new requests
        self._ended: Exception | None = None  # set once no request is waiting

    @property
    def num_waiting(self) -> int:
        """Number of prompts that are waiting for rows."""
        turns = [*(turn for *_, turn in self._first), *(turn for _, turn in self._further)]
        return sum(not turn.done() for turn in turns)

    def check_open(self) -> None:
        """Raise the error that was passed to `refuse` or `close`, if either was called."""
        if self._error is not None:
            raise self._error

    def check(self) -> None:
        """Raise the error that a new request would currently receive: `Busy`, or the error passed
        to `refuse` or `close`. Return if the request would be accepted.
        """
        self.check_open()
        if len(self._first) >= self._max_waiting:
            raise Busy(
                f"{len(self._first)} requests are waiting: expected fewer than {self._max_waiting}, "
                "try again later"
            )

    def refuse(self, error: Exception) -> None:
        """Reject new requests with this error. Requests that are already waiting continue."""
        self._error = error

    def close(self, error: Exception) -> None:
        """End all waiting requests, and reject new requests, with this error."""
        self._error = self._ended = error
        for *_, turn in (*self._first, *self._further):
            if not turn.done():
                turn.set_exception(error)
        self._first.clear()
        self._further.clear()

    @asynccontextmanager
    async def rows(self, count: int, *, is_first: bool, priority: int) -> AsyncIterator[None]:
        """Wait for `count` rows, and release them at the end of the `with` block."""
        if self._ended is not None:
            raise self._ended
        count = min(count, self._num_rows)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if is_first:
            heapq.heappush(self._first, (priority, next(self._order), count, turn))
        else:
            self._further.append((count, turn))
        self._give()
        try:
            await turn
            yield
        finally:
            # `_give` skips requests that were cancelled while waiting.
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._num_given -= count
                self._num_requests -= is_first
            turn.cancel()
            self._give()

    def _give(self) -> None:
        while self._first:
            *_, count, turn = self._first[0]
            if not turn.done() and self._num_given + count > self._num_rows:
                break
            heapq.heappop(self._first)
            self._give_to(count, turn, is_first=True)
        most = self._num_rows // (2 if self._num_requests < 2 else 8)
        while self._further:
            count, turn = self._further[0]
            if not turn.done() and self._num_given + count > max(most, count):
                return
            self._further.popleft()
            self._give_to(count, turn, is_first=False)

    def _give_to(self, count: int, turn: asyncio.Future[None], is_first: bool) -> None:
        if not turn.done():  # the request was not cancelled
            self._num_given += count
            self._num_requests += is_first
            turn.set_result(None)
