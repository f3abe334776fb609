"""Pages between a device and the host, beside the engine's computing."""

from __future__ import annotations

import warnings

import numpy as np

from kvcache import ops
from kvcache.worker.calibration import (
    COPY_ENGINE,
    IN,
    KERNEL,
    METHODS,
    OUT,
    STAGING,
    Calibration,
    calibration_of,
)
from kvcache.worker.page_checks import check_once, check_range, integers
from kvcache.worker.pages import Pages
from kvcache.worker.route import Route
from kvcache.worker.swap_job import Lane, SwapJob, until
from kvcache.worker.timeline import CpuTimeline, CudaTimeline, timeline_of

_ENGINES = {KERNEL: ops.KERNEL, COPY_ENGINE: ops.COPY_ENGINE}
_NAMES = {OUT: "swap-out", IN: "swap-in"}


class SwapEngine:
    """Swaps pages between a device and the host on streams of its own, one per direction.

    What is ordered, and against what: a swap-out reads what the calling stream has computed so far, and
    `before_write` holds the calling stream back until pages that are to be written have been read; a
    swap-in begins when all that the calling stream was given so far is done, and `before_read` holds the
    calling stream back until pages have arrived. Jobs of the two directions that touch the same page,
    on either side, come one after the other. A job's pages must not be written otherwise.

    `method`: "kernel", "copy_engine" or "staging"; None chooses by `calibration` (default: what `kvcache
    bench --calibrate` has measured here) from direction and mean size of what lies together on both
    sides. Staging puts pages together in `staging_bytes` of device memory, so that one piece per page
    crosses the bus, and a swapped-out page may be written as soon as it lies there.
    `layers_per_event` > 0 lets swapped-in layers be used while later ones still arrive (not with
    `method` "staging", which brings whole pages).

    On the CPU everything has happened when a call returns. The engine and the memories must live until
    all jobs are over (`wait`). ValueError where the two sides do not fit, or the kernel is asked for and
    the host's pages are not pinned.

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
        self._lanes = {
            OUT: Lane(device, host, self._timeline.new_stream()),
            IN: Lane(host, device, self._timeline.new_stream(), by_layer=by_layer),
        }
        for direction, lane in self._lanes.items():
            if self._may_stage(direction):
                self._make_staging(lane, staging_bytes)
        self._num_jobs = 0
        self._failed: set[int] = set()  # numbers of swap-outs that did not fill their pages

    @property
    def is_idle(self) -> bool:
        """Whether no job is under way, as far as anybody has looked."""
        return not any(lane.in_flight for lane in self._lanes.values())

    def swap_out(self, pairs: np.ndarray) -> SwapJob:
        """pairs: int[n, 2], device page and host page. ValueError, and nothing moves, for wrong pages.

        A failure of the device does not raise here: the job tells it.
        """
        return self._start(OUT, pairs)

    def swap_in(self, pairs: np.ndarray) -> SwapJob:
        """pairs: int[n, 2], host page and device page; else as `swap_out`."""
        return self._start(IN, pairs)

    def before_write(self, pages: np.ndarray) -> None:
        """The calling stream waits until no job reads or writes these device pages any more."""
        if self.is_idle:
            return
        pages = np.asarray(pages, np.int64)
        stream = self._timeline.current()
        self._after(stream, self._lanes[OUT].last_reading(pages), "released")
        self._after(stream, self._lanes[IN].last_writing(pages), "done")

    def before_read(self, job: SwapJob, layer: int | None = None) -> None:
        """The calling stream waits until a swapped-in layer (None: all of them) has arrived."""
        event = job.done
        if layer is not None and job.error is None:
            event = next((event for end, event in job.layers if layer < end), job.done)
        if event is not None:
            self._timeline.wait(self._timeline.current(), event)

    def settle(self) -> None:
        """The calling stream waits for all swap-ins so far."""
        lane = self._lanes[IN]
        self._after(self._timeline.current(), lane.in_flight.get(lane.last), "done")

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns when no job is under way. SwapError where one failed since the last time; TimeoutError
        where they take longer in all."""
        jobs = [job for lane in self._lanes.values() for job in lane.in_flight.values()]
        until(lambda: all(job.poll() for job in jobs), timeout_s, f"one of {len(jobs)} swaps")
        for lane in self._lanes.values():
            lane.forget()
        for job in jobs:
            if job.error is not None:
                raise job.error

    def fragment_bytes(self, direction: str, pairs: np.ndarray) -> float:
        """Mean bytes that lie together on both sides, neighbouring pages merged; direction: out, in."""
        route = self._lanes[direction].route
        num_runs = len(pairs)
        if route.is_dense and len(pairs) > 1:
            steps = np.diff(pairs, axis=0)
            num_runs -= int(((np.abs(steps[:, 0]) == 1) & (steps[:, 0] == steps[:, 1])).sum())
        num_fragments = num_runs * len(route.regions)
        return len(pairs) * self.device.page_bytes / max(num_fragments, 1)

    def method_for(self, direction: str, pairs: np.ndarray) -> str:
        """How these pages would move."""
        if self._method is not None or self._is_cpu:
            return self._method or KERNEL
        method = self.calibration.method(direction, self.fragment_bytes(direction, pairs))
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
        steps = self.calibration.out if direction == OUT else self.calibration.in_
        calibrated = any(method == STAGING for _, method in steps)
        is_split = len(self._lanes[direction].route.regions) > 1
        return is_split and (calibrated or not self._kernel_reaches_host)

    def _make_staging(self, lane: Lane, num_bytes: int) -> None:
        """Device memory that belongs to the lane's stream; without it, pages go another way."""
        try:
            staging = self._timeline.allocate(lane.stream, lambda: self.device.staging(num_bytes))
        except RuntimeError as error:  # of which torch's out-of-memory error is one
            if self._method == STAGING:
                raise
            warnings.warn(
                f"no {num_bytes >> 20} MiB of device memory for staging, swaps will be slower: {error}",
                RuntimeWarning,
                stacklevel=4,
            )
            return
        lane.staging = (Route(lane.source, staging), Route(staging, lane.destination))

    def _start(self, direction: str, pairs: np.ndarray) -> SwapJob:
        name = "swap_out" if direction == OUT else "swap_in"
        lane, other = self._lanes[direction], self._lanes[IN if direction == OUT else OUT]
        pairs = integers(pairs, name, (2,))
        check_range(name, "reads page", pairs[:, 0], 1, lane.source.num_blocks)
        check_range(name, "writes to page", pairs[:, 1], 1, lane.destination.num_blocks)
        check_once(f"{name} writes to page", pairs[:, 1])
        self._num_jobs += 1
        job = SwapJob(f"{_NAMES[direction]} {self._num_jobs}", pairs)
        if direction == IN:
            job.fillers = other.writers(pairs[:, 0])
        timeline, stream = self._timeline, lane.stream
        try:
            timeline.wait(stream, timeline.record(timeline.current()))
            # The other direction's: it writes what this one reads, and reads what this one writes.
            self._after(stream, other.last_writing(pairs[:, 0]), "done")
            self._after(stream, other.last_reading(pairs[:, 1]), "released")
            self._carry(direction, lane, job)
        except RuntimeError as error:
            job.fail(error)
        # Behind whatever was launched, also of a job that failed half-way.
        try:
            job.done = timeline.record(stream)
        except RuntimeError as error:
            job.fail(error)
        job.released = job.released or job.done
        lane.add(job)
        return job

    def lost_pages(self, job: SwapJob) -> np.ndarray:
        """Destination pages that do not hold what they should, of a job that is over: all of one that
        failed; of a swap-in also those whose host page a failed swap-out was to fill."""
        if job.error is not None:
            if job.fillers is None:
                self._failed.add(job.number)
            return job.pairs[:, 1]
        if job.fillers is None:
            return job.pairs[:0, 1]
        return job.pairs[np.isin(job.fillers, list(self._failed)), 1]

    def _after(self, stream: object, job: SwapJob | None, what: str) -> None:
        event = None if job is None else getattr(job, what)
        if event is not None:
            self._timeline.wait(stream, event)

    def _carry(self, direction: str, lane: Lane, job: SwapJob) -> None:
        if len(job.pairs) == 0:
            return
        method = self.method_for(direction, job.pairs)
        if method == STAGING:
            self._carry_staged(direction, lane, job)
        elif direction == IN and self.layers_per_event:
            for first in range(0, self.device.num_layers, self.layers_per_event):
                layers = slice(first, first + self.layers_per_event)
                self._copy(lane, lane.route, job.pairs, method, layers)
                job.layers.append((layers.stop, self._timeline.record(lane.stream)))
        else:
            self._copy(lane, lane.route, job.pairs, method)

    def _carry_staged(self, direction: str, lane: Lane, job: SwapJob) -> None:
        """By way of the staging memory, as many pages at a time as it holds."""
        to_staging, from_staging = lane.staging
        methods = (KERNEL, COPY_ENGINE) if direction == OUT else (COPY_ENGINE, KERNEL)
        size = to_staging.destination.num_blocks
        for first in range(0, len(job.pairs), size):
            part = job.pairs[first : first + size]
            slots = np.arange(len(part))
            self._copy(lane, to_staging, np.stack([part[:, 0], slots], 1), methods[0])
            if direction == OUT and first + size >= len(job.pairs):
                job.released = self._timeline.record(lane.stream)
            self._copy(lane, from_staging, np.stack([slots, part[:, 1]], 1), methods[1])

    def _copy(
        self,
        lane: Lane,
        route: Route,
        pairs: np.ndarray,
        method: str,
        layers: slice | None = None,
    ) -> None:
        on_bus = "cpu" in (route.source.device.type, route.destination.device.type)
        blocks = self.calibration.num_thread_blocks if on_bus else 0
        self._timeline.launch(
            lane.stream,
            lambda: route.copy(
                pairs, engine=_ENGINES[method], num_thread_blocks=blocks, layers=layers
            ),
        )
