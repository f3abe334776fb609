# SPDX-License-Identifier: Apache-2.0
"""Swaps pages between device and host while the engine computes."""

from __future__ import annotations

import warnings
import weakref

import numpy as np

from kvcache import ops
from kvcache.checks import (
    MAX_INT64,
    check_once,
    check_range,
    flag,
    instance,
    integer,
    integers,
    one_of,
    shown,
)
from kvcache.worker.pages.page_copy import PageCopy
from kvcache.worker.pages.pages import Pages
from kvcache.worker.swap.calibration import (
    COPY_ENGINE,
    DIRECTIONS,
    IN,
    KERNEL,
    METHODS,
    OUT,
    STAGING,
    Calibration,
    calibration_of,
)
from kvcache.worker.swap.job import SwapJob, SwapStream, until
from kvcache.worker.swap.staging import SwapStaging
from kvcache.worker.swap.streams import CpuStreams, CudaStreams, streams_of

_EXPEDITED = "expedited"  # key of the expedited swap-ins' stream; their direction is IN
_NAMES = {OUT: "swap-out", IN: "swap-in", _EXPEDITED: "expedited swap-in"}
# Number of thread blocks that gather pages into staging memory or scatter them from it. The engine's
# streams have the highest priority, so a grid that fills the device would stop the model's kernels.
# With 16 thread blocks, an eighth of an H200, staged swaps reached 94 to 99 % of the bus
# (benchmarks/results/gpu-nvidia-h200.json).
_STAGING_THREAD_BLOCKS = 16


class SwapEngine:
    """Swaps pages between device and host on its own streams: one per direction, and one for
    expedited swap-ins.

    Swaps start after the work that is already in the current stream. Before overwriting swapped-out
    pages, call `before_write`, which makes the current stream wait until these pages have been
    read. Before reading swapped-in pages, call `before_read`, which makes the current stream wait
    until these pages have arrived. Jobs that share a page, on either side, run one after another,
    unless both only read it. No other work may write to a job's pages.

    On devices other than CUDA, a job is complete as soon as the call that starts it returns.

    Swaps cannot be captured in a CUDA graph: `swap_out`, `swap_in`, `before_read`, `before_write` and
    `order_after_swap_ins` raise RuntimeError on a capturing stream and launch nothing. Polling a
    job is allowed while any thread captures a graph. Only one thread at a time may call an engine's
    methods, but any thread may call a job's `poll`. The engine's streams have high priority. When
    the engine is garbage-collected, its streams are destroyed after their work has finished.

    Args:
        device: Pages on the device.
        host: Pages in host memory, with fragments of the same sizes (`Pages.on_host`).
        method: "kernel", "copy_engine" or "staging". None: `calibration` selects a method for each
            swap, based on its direction and on the number and mean size of its fragments. Staging
            packs pages in device memory, so that each page crosses the bus as one fragment. A
            swapped-out page may be overwritten once it is staged.
        calibration: The calibration. None: the result of `kvcache bench --calibrate` on this
            machine or, if there is none, the built-in calibration.
        staging_bytes: Bytes of device memory for staging, per direction. One half is filled while
            the other half is emptied.
        streams: The streams to use. None: the default streams for the device.

    Raises:
        ValueError: The device pages and the host pages do not match, or `method` is "kernel" and
            the host pages are not pinned.

    Example:
        >>> device = Pages.allocate(9, [[512, 512]] * 4)
        >>> engine = SwapEngine(device, device.on_host(100))
        >>> engine.swap_out(np.array([[3, 70], [4, 71]])).wait(timeout_s=5)
        >>> engine.swap_in(np.array([[70, 8]])).poll()
        True
    """

    def __init__(
        self,
        device: Pages,
        host: Pages,
        *,
        method: str | None = None,
        calibration: Calibration | None = None,
        staging_bytes: int = 64 << 20,
        streams: CudaStreams | CpuStreams | None = None,
    ) -> None:
        instance(device, Pages, "device")
        instance(host, Pages, "host")
        if host.device.type != "cpu":
            raise ValueError(f"the host's pages are on {host.device}: expected cpu")
        if method is not None:
            one_of(method, "method", METHODS)
        instance(calibration, Calibration | None, "calibration")
        if streams is not None and not hasattr(streams, "new_stream"):
            raise TypeError(
                f"streams is {shown(streams)}: expected CudaStreams, CpuStreams or None"
            )
        staging_bytes = integer(staging_bytes, "staging_bytes", most=MAX_INT64)
        on_cuda = device.device.type == "cuda"
        if method == KERNEL and on_cuda and not host.is_pinned:
            raise ValueError(
                "method is 'kernel' and the host's pages are not pinned: expected pinned pages, or "
                "another method"
            )
        self.device, self.host = device, host
        self.calibration = calibration or calibration_of(device.device)
        self._streams = streams_of(device.device) if streams is None else streams
        self._method = method
        self._is_cpu = isinstance(self._streams, CpuStreams)  # the CPU has only one method
        self._kernel_reaches_host = host.is_pinned or not on_cuda
        if isinstance(self._streams, CudaStreams):
            ops.warm_up(device.device)
        # The engine owns its streams. The finalizer keeps the pages alive until the streams' work
        # has finished.
        self._own_streams, kept = [], [device, host]
        weakref.finalize(self, _close, self._streams, self._own_streams, kept)
        self._swap_streams = {
            OUT: SwapStream(device, host, self._new_stream()),
            IN: SwapStream(host, device, self._new_stream()),
            _EXPEDITED: SwapStream(host, device, self._new_stream()),
        }
        for direction in DIRECTIONS:
            if self._may_stage(direction):
                swap_stream = self._swap_streams[direction]
                kept.append(self._make_staging(direction, swap_stream, staging_bytes))
        self._num_jobs = 0
        # Name of the job that is being launched or whose launch was interrupted.
        self._begun: str | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no job was in flight when the jobs were last polled."""
        return not any(swap_stream.in_flight for swap_stream in self._swap_streams.values())

    def swap_out(self, pairs: np.ndarray) -> SwapJob:
        """Start a swap-out.

        Args:
            pairs: int[n, 2]. Device page and host page.

        Returns:
            The job. If the device fails, this call does not raise an exception; instead, the job's
            `error` is set.

        Raises:
            ValueError: A page is out of range or written twice. Nothing was copied.
            RuntimeError: A CUDA graph is being captured on the current stream. Nothing was copied.
        """
        return self._start(OUT, pairs)

    def swap_in(self, pairs: np.ndarray, *, expedited: bool = False) -> SwapJob:
        """Start a swap-in.

        Args:
            pairs: int[n, 2]. Host page and device page.
            expedited: If True, the swap-in does not queue behind regular swap-ins: it waits only
                for those that write to its device pages. Its pages are not staged.

        Returns:
            The job. The errors are the same as for `swap_out`.
        """
        return self._start(_EXPEDITED if flag(expedited, "expedited") else IN, pairs)

    def before_write(self, pages: np.ndarray) -> None:
        """Make the current stream wait until no job reads or writes these device pages.

        Args:
            pages: int[n]. Device pages.

        Raises:
            ValueError: A page is out of range.
            RuntimeError: A CUDA graph is being captured on the current stream while jobs are in
                flight.
        """
        self._check_whole()
        pages = integers(pages, "before_write", ())
        check_range("before_write", "is page", pages, 0, self.device.num_blocks)
        if self.is_idle:
            return
        self.check_not_captured("before_write")
        stream = self._streams.current()
        self._after(stream, self._swap_streams[OUT].last_reading(pages), "released")
        for swap_stream in self._swap_ins:
            self._after(stream, swap_stream.last_writing(pages), "done")

    def before_read(self, job: SwapJob) -> None:
        """Make the current stream wait until the pages of a swap-in have arrived.

        Args:
            job: A swap-in.

        Raises:
            RuntimeError: A CUDA graph is being captured on the current stream.
        """
        instance(job, SwapJob, "job")
        self.check_not_captured("before_read")
        self._after(self._streams.current(), job, "done")

    def order_after_swap_ins(self) -> None:
        """Make the current stream wait for all swap-ins started so far.

        Raises:
            RuntimeError: A CUDA graph is being captured on the current stream while swap-ins are in
                flight.
        """
        for swap_stream in self._swap_ins:
            job = swap_stream.in_flight.get(swap_stream.last)
            if job is not None:
                self.check_not_captured("order_after_swap_ins")
                self._after(self._streams.current(), job, "done")

    def check_not_captured(self, name: str) -> None:
        """Raise RuntimeError if a CUDA graph is being captured on the current stream.

        A capture cannot wait for an event that was recorded outside of the capture, and work
        outside cannot wait for events that were recorded in the capture.

        Args:
            name: Name of the call, for the error message.
        """
        if self._streams.is_capturing():
            raise RuntimeError(
                f"{name} was called while the current stream is captured in a CUDA graph: start swaps "
                "and wait for them outside graphs"
            )

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until no job is in flight.

        Args:
            timeout_s: Maximum time to wait for all jobs together, in seconds. None waits
                indefinitely.

        Raises:
            SwapError: A job has failed since the last call.
            TimeoutError: The jobs took longer than `timeout_s`.
        """
        jobs = [
            job
            for swap_stream in self._swap_streams.values()
            for job in list(swap_stream.in_flight.values())
        ]
        until(lambda: all(job.poll() for job in jobs), timeout_s, f"one of {len(jobs)} swaps")
        for swap_stream in self._swap_streams.values():
            swap_stream.forget()
        for job in jobs:
            if job.error is not None:
                raise job.error

    def fragment_bytes(self, direction: str, pairs: np.ndarray) -> float:
        """Return the mean bytes of a fragment in a direction ("out" or "in"), with merged pages."""
        num_fragments = self.num_fragments(direction, pairs)
        return len(pairs) * self.device.page_bytes / num_fragments

    def num_fragments(self, direction: str, pairs: np.ndarray) -> int:
        """Return the number of fragments after merging consecutive pages, at least 1."""
        one_of(direction, "direction", DIRECTIONS)
        pairs = integers(pairs, "pairs", (2,))
        page_copy = self._swap_streams[direction].page_copy
        num_runs = len(pairs)
        if page_copy.is_dense and len(pairs) > 1:
            steps = np.diff(pairs, axis=0)
            num_runs -= int(((np.abs(steps[:, 0]) == 1) & (steps[:, 0] == steps[:, 1])).sum())
        return max(num_runs * len(page_copy.regions), 1)

    def method_for(self, direction: str, pairs: np.ndarray) -> str:
        """Return the method that a swap of these pages would use."""
        if self._method is not None or self._is_cpu:
            return self._method or KERNEL
        num_fragments = self.num_fragments(direction, pairs)
        fragment_bytes = len(pairs) * self.device.page_bytes / num_fragments
        method = self.calibration.method(direction, fragment_bytes, num_fragments)
        swap_stream = self._swap_streams[direction]
        # Staging transfers whole pages, so it does not help if a page is already a single fragment.
        no_staging = swap_stream.staging is None
        if method == STAGING and (no_staging or len(swap_stream.page_copy.regions) == 1):
            method = KERNEL
        if method == KERNEL and not self._kernel_reaches_host:
            method = COPY_ENGINE if no_staging else STAGING
        return method

    @property
    def _swap_ins(self) -> list[SwapStream]:
        return [self._swap_streams[key] for key in (IN, _EXPEDITED)]

    def _may_stage(self, direction: str) -> bool:
        if self._method is not None or self._is_cpu:
            return self._method == STAGING
        calibrated = STAGING in self.calibration.methods(direction)
        is_split = len(self._swap_streams[direction].page_copy.regions) > 1
        return is_split and (calibrated or not self._kernel_reaches_host)

    def _new_stream(self) -> object:
        self._own_streams.append(self._streams.new_stream())
        return self._own_streams[-1]

    def _make_staging(
        self, direction: str, swap_stream: SwapStream, num_bytes: int
    ) -> Pages | None:
        """Allocate a direction's staging memory, or return None if there is not enough."""
        try:
            memory = self.device.staging(num_bytes)
        except RuntimeError as error:  # torch's out-of-memory error is a RuntimeError
            if self._method == STAGING:
                raise
            warnings.warn(
                f"{num_bytes >> 20} MiB of device memory for staging are not available; swaps will be "
                f"slower: {error}",
                RuntimeWarning,
                stacklevel=4,
            )
            return None
        relayout = self._new_stream()
        first, last = (
            (relayout, swap_stream.stream) if direction == OUT else (swap_stream.stream, relayout)
        )
        swap_stream.staging = SwapStaging(
            swap_stream.source, swap_stream.destination, memory, first, last, self._streams
        )
        return memory

    def _start(self, key: str, pairs: np.ndarray) -> SwapJob:
        direction = OUT if key == OUT else IN
        swap_stream = self._swap_streams[key]
        pairs = self._checked(f"swap_{direction}", swap_stream, pairs)
        self._num_jobs += 1
        job = swap_stream.new_job(f"{_NAMES[key]} {self._num_jobs}", pairs)
        if direction == IN:
            job.fillers = self._swap_streams[OUT].writers(pairs[:, 0])
        method = self.method_for(direction, pairs)
        if method == STAGING and swap_stream.staging is None:  # an expedited swap-in
            method = KERNEL if self._kernel_reaches_host else COPY_ENGINE
        self._begun = job.name
        self._launch(direction, swap_stream, job, method)
        swap_stream.add(job)
        self._begun = None
        return job

    def _checked(self, name: str, swap_stream: SwapStream, pairs: np.ndarray) -> np.ndarray:
        pairs = integers(pairs, name, (2,))
        check_range(name, "reads page", pairs[:, 0], 1, swap_stream.source.num_blocks)
        check_range(name, "writes to page", pairs[:, 1], 1, swap_stream.destination.num_blocks)
        check_once(f"{name} writes to page", pairs[:, 1])
        self.check_not_captured(name)
        self._check_whole()
        return pairs

    def _launch(self, direction: str, swap_stream: SwapStream, job: SwapJob, method: str) -> None:
        """Launch a job after the work that it must follow. Errors are recorded in the job."""
        streams = self._streams
        staging = swap_stream.staging if method == STAGING else None
        begin = swap_stream.stream if staging is None else staging.first
        end = swap_stream.stream if staging is None else staging.last
        try:
            streams.wait(begin, streams.record(streams.current()))
            self._after_the_job_before(swap_stream, begin, end)
            settled = self._after_other_streams(swap_stream, begin, job.pairs) and direction == IN
            self._carry(direction, swap_stream, job, method, settled)
        except (RuntimeError, MemoryError) as error:
            job.fail(error)
        # Record the event after all launched work, even if the launch failed partway through.
        try:
            if job.error is not None and staging is not None:
                staging.join()
            job.done = streams.record(end)
        except (RuntimeError, MemoryError) as error:
            job.fail(error)
        job.released = job.released or job.done

    def _check_whole(self) -> None:
        """Raise RuntimeError if an interrupt came between the launch of a job and its record."""
        if self._begun is not None:
            raise RuntimeError(
                f"the swap engine is broken: an interrupt occurred while {self._begun} was launched, and "
                "its copies may still be in flight: create a new engine"
            )

    def invalid_pages(self, job: SwapJob) -> np.ndarray:
        """Return those destination pages of a finished job whose content is invalid.

        For a failed job, these are all of its destination pages. For a swap-in, they include each
        page whose source host page should have been filled by a swap-out that failed.

        Args:
            job: A finished job.

        Returns:
            int64[n].
        """
        instance(job, SwapJob, "job")
        if job.error is not None:
            return job.pairs[:, 1]
        if job.fillers is None:
            return job.pairs[:0, 1]
        out = self._swap_streams[OUT]
        out.forget()  # polls the swap-outs, which may have failed since the last poll
        return job.pairs[np.isin(job.fillers, list(out.failed)), 1]

    def _after(self, stream: object, job: SwapJob | None, what: str) -> None:
        event = None if job is None else getattr(job, what)
        if event is not None:
            self._streams.wait(stream, event)

    def _after_the_job_before(self, swap_stream: SwapStream, begin: object, end: object) -> None:
        """Order a job after the one before it, unless a shared CUDA stream already does."""
        if swap_stream.begin is not begin or swap_stream.end is not end:
            self._after(begin, swap_stream.in_flight.get(swap_stream.last), "done")
        swap_stream.begin, swap_stream.end = begin, end

    def _after_other_streams(
        self, swap_stream: SwapStream, begin: object, pairs: np.ndarray
    ) -> bool:
        """Order a job after the jobs of other streams that write its sources or use its destinations.

        Returns whether no job in flight writes the sources. They may then be read immediately, before
        earlier work in the stream finishes.
        """
        settled = True
        for other in self._swap_streams.values():
            if other is swap_stream:
                continue
            if other.source is swap_stream.source:  # same direction
                self._after(begin, other.last_writing(pairs[:, 1]), "done")
                continue
            filler = other.last_writing(pairs[:, 0])
            self._after(begin, filler, "done")
            self._after(begin, other.last_reading(pairs[:, 1]), "released")
            settled = settled and (filler is None or filler.poll())
        return settled

    def _carry(
        self, direction: str, swap_stream: SwapStream, job: SwapJob, method: str, settled: bool
    ) -> None:
        if len(job.pairs) == 0:
            return
        if method == STAGING:
            bus = swap_stream.stream

            def copy(stream: object, page_copy: PageCopy, pairs: np.ndarray) -> None:
                engine = self._engine(COPY_ENGINE, settled) if stream is bus else ops.KERNEL
                self._copy(stream, page_copy, pairs, engine)

            job.released = swap_stream.staging.carry(job.pairs, copy)
        else:
            engine = self._engine(method, settled)
            self._copy(swap_stream.stream, swap_stream.page_copy, job.pairs, engine)

    def _engine(self, method: str, settled: bool) -> int:
        """Return the op's `engine`. `settled`: no job in flight writes the host pages."""
        if method == KERNEL:
            return ops.KERNEL
        return ops.COPY_ENGINE_SETTLED if settled else ops.COPY_ENGINE

    def _copy(self, stream: object, page_copy: PageCopy, pairs: np.ndarray, engine: int) -> None:
        on_bus = "cpu" in (page_copy.source.device.type, page_copy.destination.device.type)
        blocks = self.calibration.num_thread_blocks if on_bus else _STAGING_THREAD_BLOCKS
        self._streams.launch(
            stream, lambda: page_copy.copy(pairs, engine=engine, num_thread_blocks=blocks)
        )


def _close(streams: CudaStreams | CpuStreams, own: list[object], kept: list[object]) -> None:
    """Destroy streams after their work has finished, and keep the memory alive until then."""
    streams.close(own)
    kept.clear()
