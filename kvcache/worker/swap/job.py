# SPDX-License-Identifier: Apache-2.0
"""Swap jobs, and the order in which each direction's jobs complete."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from kvcache.checks import instance
from kvcache.checks import number as checked_number
from kvcache.worker.pages.page_copy import PageCopy
from kvcache.worker.pages.pages import Pages
from kvcache.worker.swap.staging import SwapStaging

_POLL_SECONDS = 50e-6


class SwapError(RuntimeError):
    """Raised if a swap failed. It names the job, whose destination pages have invalid content."""


class SwapJob:
    """A swap of pages in one direction. Created by `SwapEngine`.

    Args:
        name: Name of the job in error messages.
        pairs: int64[n, 2]. Source page and destination page.
        number: Sequence number of the job within its direction.
        failed: Set that receives `number` if the job fails.
    """

    def __init__(self, name: str, pairs: np.ndarray, number: int, failed: set[int]) -> None:
        self.name = name
        self.pairs = pairs
        self.number = number
        self._failed = failed
        # For a swap-in, the numbers of the swap-outs that filled its source pages.
        self.fillers: np.ndarray | None = None
        self.error: SwapError | None = None
        # The event after which the sources may be overwritten, and the event after which all pages have
        # arrived.
        self.released = self.done = None

    def poll(self) -> bool:
        """Return whether all pages have arrived or the job has failed (see `error`)."""
        try:
            return self.done is None or self.done.query()
        except RuntimeError as error:
            self.fail(error)
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all pages have arrived.

        Args:
            timeout_s: Maximum time to wait, in seconds. None waits indefinitely.

        Raises:
            SwapError: The job failed.
            TimeoutError: The job took longer than `timeout_s`.
        """
        until(self.poll, timeout_s, self.name)
        if self.error is not None:
            raise self.error

    def fail(self, error: Exception) -> None:
        """Record the job's first error."""
        instance(error, BaseException, "error")
        if self.error is not None:
            return
        self.error = SwapError(f"{self.name} of {len(self.pairs)} pages failed: {error}")
        self.error.__cause__ = error
        self._failed.add(self.number)


class SwapStream:
    """One direction's stream, its jobs in order, and the last jobs that use each page.

    Jobs complete and release their source pages in the order of their numbers.
    """

    def __init__(self, source: Pages, destination: Pages, stream: object) -> None:
        self.source, self.destination, self.stream = source, destination, stream
        self.page_copy = PageCopy(source, destination)
        self.staging: SwapStaging | None = None
        self.begin = self.end = stream  # streams on which the last job starts and ends
        self.in_flight: dict[int, SwapJob] = {}  # jobs in flight by number, in stream order
        self.last = 0
        self.failed: set[int] = set()  # numbers of failed jobs
        self._reads = np.zeros(source.num_blocks, np.int64)
        self._writes = np.zeros(destination.num_blocks, np.int64)

    def new_job(self, name: str, pairs: np.ndarray) -> SwapJob:
        """Create a job. Launch the job, then pass it to `add`."""
        return SwapJob(name, pairs, self.last + 1, self.failed)

    def add(self, job: SwapJob) -> None:
        """Record a launched job."""
        self.forget()
        self.last = job.number
        self.in_flight[self.last] = job
        self._reads[job.pairs[:, 0]] = self.last
        self._writes[job.pairs[:, 1]] = self.last

    def forget(self) -> None:
        """Remove completed jobs, oldest first. No job completes before an earlier one."""
        for number, job in list(self.in_flight.items()):
            if not job.poll():
                break
            self.in_flight.pop(number, None)  # another thread may have removed it

    def last_reading(self, pages: np.ndarray) -> SwapJob | None:
        """Return the last job in flight that reads any of these pages. Earlier jobs end before it."""
        return self._last(self._reads, pages)

    def last_writing(self, pages: np.ndarray) -> SwapJob | None:
        """Return the last job in flight that writes any of these pages."""
        return self._last(self._writes, pages)

    def writers(self, pages: np.ndarray) -> np.ndarray:
        """Return the number of the last job that wrote each of these pages, or 0."""
        return self._writes[pages]

    def _last(self, jobs: np.ndarray, pages: np.ndarray) -> SwapJob | None:
        if not self.in_flight or len(pages) == 0:
            return None
        return self.in_flight.get(int(jobs[pages].max()))


def until(is_over: Callable[[], bool], timeout_s: float | None, name: str) -> None:
    """Poll until `is_over()` returns true.

    After `timeout_s`, raises a TimeoutError that contains `name`.
    """
    deadline = None
    if timeout_s is not None:
        deadline = time.monotonic() + checked_number(timeout_s, "timeout_s")
    while not is_over():
        if deadline is not None and time.monotonic() >= deadline:
            raise TimeoutError(f"{name} has not finished after {timeout_s} s")
        time.sleep(_POLL_SECONDS)
