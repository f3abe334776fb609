# SPDX-License-Identifier: Apache-2.0
"""The thread that calls a store."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import PriorityQueue
from typing import Any

from kvcache_exchange.store import answers
from kvcache_exchange.store.base import BlockStore

READ, WRITE, _END = 0, 1, 2  # priorities, highest first


@dataclass(eq=False)
class Call:
    """A call that is queued, running or finished."""

    work: Callable[[], Any]
    result: Any = None
    error: BaseException | None = None
    is_given_up: bool = False  # abandoned by the caller; not started if still queued
    is_over: bool = False
    tag: Any = None
    evicted: list[str] = field(default_factory=list)  # evicted keys; set by the store's thread
    begun_at: float = 0.0


class StoreThread:
    """Calls a store in a separate thread, one call at a time. Reads take precedence over writes.

    The thread is a daemon, so a call that never returns does not prevent the process from exiting.
    Until such a call returns, the store, the queued calls and everything that they refer to stay in
    memory. `close` waits for queued calls for a limited time.
    """

    def __init__(self, store: BlockStore, open_store: Callable[[], Any]) -> None:
        self._store, self._open = store, open_store
        self._waiting: PriorityQueue[tuple[int, int, Call | None]] = PriorityQueue()
        self._number = 0
        self._over: deque[Call] = deque()
        self._is_open = False
        self.running: Call | None = None
        self._thread = threading.Thread(target=self._run, name="kvcache store", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], Any], priority: int, tag: Any = None) -> Call:
        """Queue a call to `work` and return the call."""
        call = Call(work, tag=tag)
        self._put(priority, call)
        return call

    def take_over(self) -> Iterator[Call]:
        """Yield each finished call once, in order of completion.

        Each call is removed from the queue just before it is yielded, so if the consumer raises an
        exception, the remaining calls stay queued.
        """
        for _ in range(len(self._over)):
            yield self._over.popleft()

    def close(self, timeout_s: float) -> bool:
        """Finish the queued calls, stop the thread, and close the store. Returns False after a
        timeout.
        """
        self._put(_END, None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _put(self, priority: int, call: Call | None) -> None:
        self._number += 1
        self._waiting.put((priority, self._number, call))

    def _run(self) -> None:
        while (call := self._waiting.get()[2]) is not None:
            call.begun_at = time.monotonic()
            self.running = call
            try:
                if not call.is_given_up:
                    if not self._is_open:
                        self._over.append(
                            Call(self._open, self._open(), is_over=True, tag="opened")
                        )
                        self._is_open = True
                    try:
                        call.result = call.work()
                    finally:
                        evicted = self._store.take_evicted()
                        call.evicted = answers.texts(evicted, "take_evicted")
            except BaseException as error:  # any exception counts as a miss
                call.error = error
            call.is_over = True
            self.running = None
            self._over.append(call)
            del call
        try:
            self._store.close()
        except BaseException:  # the store is no longer used, so its errors are ignored
            return
