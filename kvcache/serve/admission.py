"""Who gets the engine's rows next: requests in turn, so that none with many prompts keeps others out."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Busy(Exception):
    """Too many requests wait already."""


class Admission:
    """Gives out the rows of an engine to the prompts of requests. One event loop calls it.

    One prompt of each request takes any row that is free, by priority and then in order. Others of the
    same request take rows only while less than a quarter of them are given out: however many prompts a
    request has, the next request finds rows, and steps that are not much longer.
    """

    def __init__(self, num_rows: int, max_waiting: int) -> None:
        self._num_rows, self._max_waiting = num_rows, max_waiting
        self._num_given = 0
        self._order = itertools.count()
        self._first: list[tuple[int, int, int, asyncio.Future[None]]] = []  # a heap
        self._further: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._error: Exception | None = None  # what comes is refused with it
        self._ended: Exception | None = None  # nothing waits any more

    def check(self) -> None:
        """Raises what a request that comes now is refused with: `Busy`, or the error of `close`."""
        if self._error is not None:
            raise self._error
        if len(self._first) >= self._max_waiting:
            raise Busy(
                f"{len(self._first)} requests wait already: expected fewer than {self._max_waiting}, "
                "try later"
            )

    def refuse(self, error: Exception) -> None:
        """Has `check` refuse what comes with this error; what waits goes on."""
        self._error = error

    def close(self, error: Exception) -> None:
        """Ends all waiting, and refuses what comes, with this error."""
        self._error = self._ended = error
        for *_, turn in (*self._first, *self._further):
            if not turn.done():
                turn.set_exception(error)
        self._first.clear()
        self._further.clear()

    @asynccontextmanager
    async def rows(self, count: int, *, is_first: bool, priority: int) -> AsyncIterator[None]:
        """Waits for so many rows, and gives them back at the end of the block."""
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
            # Cancelled while it waited: `_give` passes over it.
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._num_given -= count
            turn.cancel()
            self._give()

    def _give(self) -> None:
        while self._first:
            *_, count, turn = self._first[0]
            if not turn.done() and self._num_given + count > self._num_rows:
                break
            heapq.heappop(self._first)
            self._give_to(count, turn)
        while self._further:
            count, turn = self._further[0]
            if not turn.done() and self._num_given + count > max(self._num_rows // 4, count):
                return
            self._further.popleft()
            self._give_to(count, turn)

    def _give_to(self, count: int, turn: asyncio.Future[None]) -> None:
        if not turn.done():  # not cancelled
            self._num_given += count
            turn.set_result(None)
