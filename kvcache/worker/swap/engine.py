"""Pages between a device and the host, beside the engine's computing."""

from __future__ import annotations

import warnings
import weakref

import numpy as np

from kvcache import ops
from kvcache.checks import check_once, check_range, integers
from kvcache.worker.pages.pages import Pages
from kvcache.worker.swap.calibration import (
    COPY_ENGINE,
    IN,
    KERNEL,
    METHODS,
    OUT,
    STAGING,
    Calibration,
    calibration_of,
)
from kvcache.worker.swap.job import Lane, SwapJob, until
from kvcache.worker.swap.page_copy import Route
from kvcache.worker.swap.staging import Staging
from kvcache.worker.swap.streams import CpuTimeline, CudaTimeline, timeline_of

_NAMES = {OUT: "swap-out", IN: "swap-in"}


class SwapEngine:
    """Swaps pages between a device and the host on streams of its own, one per direction.

    What is ordered, and against what: a swap-out reads what the calling stream has computed so far, and
    `before_write` holds the calling stream back until pages that are to be written have been read; a
    swap-in begins when all that the calling stream was given so far is done, and `before_read` holds the
    calling stream back until pages have arrived. Jobs of the two directions that touch the same page,
    on either side, come one after the other. A job's pages must not be written otherwise.

    `method`: "kernel", "copy_engine" or "staging"; None chooses by `calibration` (default: what `kvcache
    bench --calibrate` has measured here) from direction, number and mean size of what lies together on
    both sides. Staging puts pages together in `staging_bytes` of device memory, so that one piece per
    page crosses the bus, and a swapped-out page may be written as soon as it lies there; one half of
    that memory is filled while the other is emptied. `batch_copies` False hands pieces to the copy
    engine one by one (as KVCACHE_BATCH_COPIES=0 does for the process), for drivers that hang in batches.
    `layers_per_event` > 0 lets swapped-in layers be used while later ones still arrive (not with
    `method` "staging", which brings whole pages).

    On the CPU everything has happened when a call returns. Swaps are not captured in CUDA graphs:
    `swap_out`, `swap_in`, `before_read`, `before_write` and `settle` raise RuntimeError on a stream that
    is being captured, and launch nothing. Jobs may be polled while any thread captures a graph. One
    thread at a time may call an engine's methods; `poll` of a job may be called by any. The engine's
    streams are its own, of high priority; they are given back, after they have done all, when the engine
    is let go of. ValueError where the two sides do not fit, or the kernel is asked for and the host's
    pages are not pinned.

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
        layers_per_event: int = 0,
        batch_copies: bool = True,
        timeline: CudaTimeline | CpuTimeline | None = None,
    ) -> None:
        if host.device.type != "cpu":
            raise ValueError(f"the host's pages are on {host.device}: expected cpu")
        if method not in (None, *METHODS):
            raise ValueError(f"method is {method!r}: expected None or one of {', '.join(METHODS)}")
        if layers_per_event < 0:
            raise ValueError(f"layers_per_event is {layers_per_event}: expected 0 or more")
        on_cuda = device.device.type == "cuda"
        if method == KERNEL and on_cuda and not host.is_pinned:
            raise ValueError(
                "method is 'kernel' and the host's pages are not pinned: expected pinned pages, or "
                "another method"
            )
        self.device, self.host = device, host
        self.calibration = calibration or calibration_of(device.device)
        self._timeline = timeline or timeline_of(device.device)
        self._method = method
        self._is_cpu = isinstance(self._timeline, CpuTimeline)  # where there is one way
        self._kernel_reaches_host = host.is_pinned or not on_cuda
        self.layers_per_event = layers_per_event
        by_layer = layers_per_event > 0
        copy_engine = ops.COPY_ENGINE if batch_copies else ops.COPY_ENGINE_SINGLY
        self._engines = {KERNEL: ops.KERNEL, COPY_ENGINE: copy_engine}
        if isinstance(self._timeline, CudaTimeline):
            ops.warm_up(device.device)
        # What is given back when the engine is let go of; the pages live until then.
        self._streams, kept = [], [device, host]
        weakref.finalize(self, _close, self._timeline, self._streams, kept)
        self._lanes = {
            OUT: Lane(device, host, self._new_stream()),
            IN: Lane(host, device, self._new_stream(), by_layer=by_layer),
        }
        for direction, lane in self._lanes.items():
            if self._may_stage(direction):
                kept.append(self._make_staging(direction, lane, staging_bytes))
        self._num_jobs = 0

    @property
    def is_idle(self) -> bool:
        """Whether no job is under way, as far as anybody has looked."""
        return not any(lane.in_flight for lane in self._lanes.values())

    def swap_out(self, pairs: np.ndarray) -> SwapJob:
        """pairs: int[n, 2], device page and host page. ValueError, and nothing moves, for wrong pages;
        RuntimeError, and nothing moves, while the calling stream is captured.

        A failure of the device does not raise here: the job tells it.
        """
        return self._start(OUT, pairs)

    def swap_in(self, pairs: np.ndarray) -> SwapJob:
        """pairs: int[n, 2], host page and device page; else as `swap_out`."""
        return self._start(IN, pairs)

    def before_write(self, pages: np.ndarray) -> None:
        """The calling stream waits until no job reads or writes these device pages (int[n]) any more.

        ValueError for wrong pages. RuntimeError while the calling stream is captured, unless no job is
        under way.
        """
        pages = integers(pages, "before_write", ())
        check_range("before_write", "is page", pages, 0, self.device.num_blocks)
        if self.is_idle:
            return
        self.check_not_captured("before_write")
        stream = self._timeline.current()
        self._after(stream, self._lanes[OUT].last_reading(pages), "released")
        self._after(stream, self._lanes[IN].last_writing(pages), "done")

    def before_read(self, job: SwapJob, layer: int | None = None) -> None:
        """The calling stream waits until a swapped-in layer (None: all of them) has arrived.

        ValueError for a layer that is not there; RuntimeError while the calling stream is captured.
        """
        if layer is not None and not 0 <= layer < self.device.num_layers:
            raise ValueError(f"layer is {layer}: expected 0 to {self.device.num_layers - 1}")
        self.check_not_captured("before_read")
        event = job.done
        if layer is not None and job.error is None:
            event = next((event for end, event in job.layers if layer < end), job.done)
        if event is not None:
            self._timeline.wait(self._timeline.current(), event)

    def settle(self) -> None:
        """The calling stream waits for all swap-ins so far. RuntimeError while it is captured, unless no
        swap-in is under way."""
        lane = self._lanes[IN]
        job = lane.in_flight.get(lane.last)
        if job is None:
            return
        self.check_not_captured("settle")
        self._after(self._timeline.current(), job, "done")

    def check_not_captured(self, name: str) -> None:
        """RuntimeError, naming the call, while the calling stream is captured in a CUDA graph.

        An event of a capture cannot be waited for outside of it, nor one from outside within it.
        """
        if self._timeline.is_capturing():
            raise RuntimeError(
                f"{name} was called while the current stream is captured in a CUDA graph: expected "
                "swaps, and waits for them, outside graphs"
            )

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns when no job is under way. SwapError where one failed since the last time; TimeoutError
        where they take longer in all."""
        jobs = [job for lane in self._lanes.values() for job in list(lane.in_flight.values())]
        until(lambda: all(job.poll() for job in jobs), timeout_s, f"one of {len(jobs)} swaps")
        for lane in self._lanes.values():
            lane.forget()
        for job in jobs:
            if job.error is not None:
                raise job.error

    def fragment_bytes(self, direction: str, pairs: np.ndarray) -> float:
        """Mean bytes that lie together on both sides, neighbouring pages merged; direction: out, in."""
        return len(pairs) * self.device.page_bytes / self.num_fragments(direction, pairs)

    def num_fragments(self, direction: str, pairs: np.ndarray) -> int:
        """Pieces that lie together on both sides, neighbouring pages merged; at least 1."""
        route = self._lanes[direction].route
        num_runs = len(pairs)
        if route.is_dense and len(pairs) > 1:
            steps = np.diff(pairs, axis=0)
            num_runs -= int(((np.abs(steps[:, 0]) == 1) & (steps[:, 0] == steps[:, 1])).sum())
        return max(num_runs * len(route.regions), 1)

    def method_for(self, direction: str, pairs: np.ndarray) -> str:
        """How these pages would move."""
        if self._method is not None or self._is_cpu:
            return self._method or KERNEL
        num_fragments = self.num_fragments(direction, pairs)
        fragment_bytes = len(pairs) * self.device.page_bytes / num_fragments
        method = self.calibration.method(direction, fragment_bytes, num_fragments)
        lane = self._lanes[direction]
        by_layer = direction == IN and self.layers_per_event > 0
        # Staged pages arrive as a whole; a page that is one piece already has nothing to gain.
        if method == STAGING and (by_layer or lane.staging is None or len(lane.route.regions) == 1):
            method = KERNEL
        if method == KERNEL and not self._kernel_reaches_host:
            method = COPY_ENGINE if by_layer or lane.staging is None else STAGING
        return method

    def _may_stage(self, direction: str) -> bool:
        if self._method is not None or self._is_cpu:
            return self._method == STAGING
        calibrated = STAGING in self.calibration.methods(direction)
        is_split = len(self._lanes[direction].route.regions) > 1
        return is_split and (calibrated or not self._kernel_reaches_host)

    def _new_stream(self) -> object:
        self._streams.append(self._timeline.new_stream())
        return self._streams[-1]

    def _make_staging(self, direction: str, lane: Lane, num_bytes: int) -> Pages | None:
        """The lane's staging memory; without it, pages go another way."""
        try:
            memory = self.device.staging(num_bytes)
        except RuntimeError as error:  # of which torch's out-of-memory error is one
            if self._method == STAGING:
                raise
            warnings.warn(
                f"no {num_bytes >> 20} MiB of device memory for staging, swaps will be slower: {error}",
                RuntimeWarning,
                stacklevel=4,
            )
            return None
        relayout = self._new_stream()
        first, last = (relayout, lane.stream) if direction == OUT else (lane.stream, relayout)
        lane.staging = Staging(lane.source, lane.destination, memory, first, last, self._timeline)
        return memory

    def _start(self, direction: str, pairs: np.ndarray) -> SwapJob:
        name = "swap_out" if direction == OUT else "swap_in"
        lane, other = self._lanes[direction], self._lanes[IN if direction == OUT else OUT]
        pairs = integers(pairs, name, (2,))
        check_range(name, "reads page", pairs[:, 0], 1, lane.source.num_blocks)
        check_range(name, "writes to page", pairs[:, 1], 1, lane.destination.num_blocks)
        check_once(f"{name} writes to page", pairs[:, 1])
        self.check_not_captured(name)
        self._num_jobs += 1
        job = lane.new_job(f"{_NAMES[direction]} {self._num_jobs}", pairs)
        if direction == IN:
            job.fillers = other.writers(pairs[:, 0])
        timeline, method = self._timeline, self.method_for(direction, pairs)
        staging = lane.staging if method == STAGING else None
        begin = lane.stream if staging is None else staging.first
        end = lane.stream if staging is None else staging.last
        try:
            timeline.wait(begin, timeline.record(timeline.current()))
            self._after_the_job_before(lane, begin, end)
            # The other direction's: it writes what this one reads, and reads what this one writes.
            self._after(begin, other.last_writing(pairs[:, 0]), "done")
            self._after(begin, other.last_reading(pairs[:, 1]), "released")
            self._carry(direction, lane, job, method)
        except RuntimeError as error:
            job.fail(error)
        # Behind whatever was launched, also of a job that failed half-way.
        try:
            if job.error is not None and staging is not None:
                staging.join()
            job.done = timeline.record(end)
        except RuntimeError as error:
            job.fail(error)
        job.released = job.released or job.done
        lane.add(job)
        return job

    def lost_pages(self, job: SwapJob) -> np.ndarray:
        """Destination pages that do not hold what they should, of a job that is over: all of one that
        failed; of a swap-in also those whose host page a failed swap-out was to fill."""
        if job.error is not None:
            return job.pairs[:, 1]
        if job.fillers is None:
            return job.pairs[:0, 1]
        out = self._lanes[OUT]
        out.forget()  # a swap-out that failed late may not have been polled since
        return job.pairs[np.isin(job.fillers, list(out.failed)), 1]

    def _after(self, stream: object, job: SwapJob | None, what: str) -> None:
        event = None if job is None else getattr(job, what)
        if event is not None:
            self._timeline.wait(stream, event)

    def _after_the_job_before(self, lane: Lane, begin: object, end: object) -> None:
        """Jobs of a lane come one after the other; where one has other streams than the one before, the
        streams alone do not say so."""
        if lane.begin is not begin or lane.end is not end:
            self._after(begin, lane.in_flight.get(lane.last), "done")
        lane.begin, lane.end = begin, end

    def _carry(self, direction: str, lane: Lane, job: SwapJob, method: str) -> None:
        if len(job.pairs) == 0:
            return
        if method == STAGING:
            bus = lane.stream

            def copy(stream: object, route: Route, pairs: np.ndarray) -> None:
                self._copy(stream, route, pairs, COPY_ENGINE if stream is bus else KERNEL)

            job.released = lane.staging.carry(job.pairs, copy)
        elif direction == IN and self.layers_per_event:
            for first in range(0, self.device.num_layers, self.layers_per_event):
                layers = slice(first, first + self.layers_per_event)
                self._copy(lane.stream, lane.route, job.pairs, method, layers)
                job.layers.append((layers.stop, self._timeline.record(lane.stream)))
        else:
            self._copy(lane.stream, lane.route, job.pairs, method)

    def _copy(
        self,
        stream: object,
        route: Route,
        pairs: np.ndarray,
        method: str,
        layers: slice | None = None,
    ) -> None:
        on_bus = "cpu" in (route.source.device.type, route.destination.device.type)
        blocks = self.calibration.num_thread_blocks if on_bus else 0
        self._timeline.launch(
            stream,
            lambda: route.copy(
                pairs, engine=self._engines[method], num_thread_blocks=blocks, layers=layers
            ),
        )


def _close(timeline: CudaTimeline | CpuTimeline, streams: list[object], kept: list[object]) -> None:
    """Gives an engine's streams back once they have done all; until then its memories are kept."""
    timeline.close(streams)
    kept.clear()
