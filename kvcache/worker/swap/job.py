"""The jobs of a swap engine, and the jobs of each direction in order."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from kvcache.checks import instance
from kvcache.checks import number as checked_number
from kvcache.worker.pages.pages import Pages
from kvcache.worker.swap.page_copy import PageCopy
from kvcache.worker.swap.staging import Staging

_POLL_SECONDS = 50e-6


class SwapError(RuntimeError):
    """A swap failed: the message names the job, and the content of its pages is invalid."""


class SwapJob:
    """A swap of pages in one direction. `pairs`: int64[n, 2], source page and destination page.

    number: counts the jobs of a direction. failed: the set to which the number is added where the job
    fails.
    """

    def __init__(self, name: str, pairs: np.ndarray, number: int, failed: set[int]) -> None:
        self.name = name
        self.pairs = pairs
        self.number = number
        self._failed = failed
        # For a swap-in: the numbers of the swap-outs that filled its source pages.
        self.fillers: np.ndarray | None = None
        self.error: SwapError | None = None
        self.released = self.done = None  # events: sources may be written; all pages have arrived
        self.layers: list[tuple[int, object]] = []  # (end of the layers, event of their arrival)

    def poll(self) -> bool:
        """Whether the job is over: all pages have arrived, or it has failed (`error`)."""
        try:
            return self.done is None or self.done.query()
        except RuntimeError as error:
            self.fail(error)
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until all pages have arrived.

        SwapError where the job failed, TimeoutError where it takes longer than `timeout_s`.
        """
        until(self.poll, timeout_s, self.name)
        if self.error is not None:
            raise self.error

    def fail(self, error: Exception) -> None:
        """Records the first error."""
        instance(error, BaseException, "error")
        if self.error is not None:
            return
        self.error = SwapError(f"{self.name} of {len(self.pairs)} pages failed: {error}")
        self.error.__cause__ = error
        self._failed.add(self.number)


class SwapStream:
    """One direction: its stream, its jobs in order, and per page the last jobs that use it.

    Jobs end, and release their sources, in the order of their numbers.
    """

    def __init__(
        self, source: Pages, destination: Pages, stream: object, *, by_layer: bool = False
    ) -> None:
        self.source, self.destination, self.stream = source, destination, stream
        self.page_copy = PageCopy(source, destination, by_layer=by_layer)
        self.staging: Staging | None = None
        self.begin = self.end = stream  # streams in which the last job begins and ends
        self.in_flight: dict[int, SwapJob] = {}  # in the order of the stream
        self.last = 0
        self.failed: set[int] = set()  # numbers of jobs that did not fill their pages
        self._reads = np.zeros(source.num_blocks, np.int64)
        self._writes = np.zeros(destination.num_blocks, np.int64)

    def new_job(self, name: str, pairs: np.ndarray) -> SwapJob:
        """Makes the job that is passed to `add` once it is launched."""
        return SwapJob(name, pairs, self.last + 1, self.failed)

    def add(self, job: SwapJob) -> None:
        """Records a job that was launched."""
        self.forget()
        self.last = job.number
        self.in_flight[self.last] = job
        self._reads[job.pairs[:, 0]] = self.last
        self._writes[job.pairs[:, 1]] = self.last

    def forget(self) -> None:
        """Drops jobs that are over, oldest first. After a job under way no later one is over."""
        for number, job in list(self.in_flight.items()):
            if not job.poll():
                break
            self.in_flight.pop(number, None)  # another thread may have removed it

    def last_reading(self, pages: np.ndarray) -> SwapJob | None:
        """The last job under way that reads these pages. Once it is over, all earlier ones are."""
        return self._last(self._reads, pages)

    def last_writing(self, pages: np.ndarray) -> SwapJob | None:
        """As `last_reading`, for jobs that write these pages."""
        return self._last(self._writes, pages)

    def writers(self, pages: np.ndarray) -> np.ndarray:
        """Numbers of the last jobs that wrote to these pages; 0 where there is none."""
        return self._writes[pages]

    def _last(self, jobs: np.ndarray, pages: np.ndarray) -> SwapJob | None:
        if not self.in_flight or len(pages) == 0:
            return None
        return self.in_flight.get(int(jobs[pages].max()))


def until(is_over: Callable[[], bool], timeout_s: float | None, name: str) -> None:
    """Polls until `is_over()`. TimeoutError with `name` after `timeout_s`."""
    deadline = None
    if timeout_s is not None:
        deadline = time.monotonic() + checked_number(timeout_s, "timeout_s")
    while not is_over():
        if deadline is not None and time.monotonic() >= deadline:
            raise TimeoutError(f"{name} is not over after {timeout_s} s")
        time.sleep(_POLL_SECONDS)
