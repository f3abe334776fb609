# SPDX-License-Identifier: Apache-2.0
"""Benchmarks page copies against a contiguous copy of the same number of bytes in the same run."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeVar

import numpy as np
import torch

from kvcache.worker import Pages, SwapEngine
from kvcache.worker.pages.page_copy import PageCopy
from kvcache.worker.pages.pinning import allocate_host
from kvcache.worker.swap.calibration import (
    DEFAULT,
    DIRECTIONS,
    IN,
    KERNEL,
    METHODS,
    OUT,
    Calibration,
    calibration_of,
)

T = TypeVar("T")

FRAGMENTS = tuple(2**n for n in range(12, 23))  # sizes from 4 KiB to 4 MiB
BOTH, HOST = "both", "host"  # "both": both directions concurrently; "host": within host memory
# Size of the pools over which pages are scattered. It exceeds the memory that a device's TLBs cover.
POOL_BYTES = 2 << 30
_COUNTS = (32, 256, 2048, 16384)  # numbers of fragments per swap to measure in a calibration
_THREAD_BLOCKS = (1, 2, 4, 8, 12, 16, 24, 32)
# Upper bound on any device's clock rate. With this value, `hold` never blocks for too short a time.
_MOST_CYCLES_PER_S = 2e9
_LEAST_HOLD_S, _MOST_HOLD_S = 200e-6, 0.1
_STAGING_BYTES = 64 << 20  # per direction; the default of `SwapEngine`


@dataclass(frozen=True)
class Rate:
    """The result of one measurement.

    Attributes:
        direction: "out", "in", "both" or "host".
        fragment: Bytes per fragment.
        method: The copy method. For "both", the methods out and in if they differ.
        gb_per_s: Measured bandwidth.
        contiguous_gb_per_s: Bandwidth of a contiguous copy.
        num_thread_blocks: Number of thread blocks in the kernel. None if no kernel accesses host
            memory.
        num_fragments: Number of fragments per swap.
        submit_us: Time in microseconds that the host spent on submission. It does not affect the
            bandwidth unless `submission_is_hidden` is False.
        submission_is_hidden: Whether submission completed before the device started. If not, the
            device waited for submission.
    """

    direction: str
    fragment: int
    method: str
    gb_per_s: float
    contiguous_gb_per_s: float
    num_thread_blocks: int | None = None  # None: no kernel accesses host memory
    num_fragments: int | None = None
    submit_us: float | None = None
    submission_is_hidden: bool | None = None

    @property
    def sustained_gb_per_s(self) -> float:
        """Bandwidth of many such swaps one after another, which the host may limit: the submission
        of small fragments to the copy engine takes longer than their transfer.
        """
        if not self.submit_us or self.num_fragments is None:
            return self.gb_per_s
        moved = self.num_fragments * self.fragment
        return min(self.gb_per_s, moved / self.submit_us / 1e3)

    @property
    def share(self) -> float:
        """Bandwidth as a fraction of the contiguous copy's bandwidth."""
        return self.gb_per_s / self.contiguous_gb_per_s


@dataclass(frozen=True)
class Timing:
    """The median times of a launch, in seconds.

    Attributes:
        device_s: Time during which the device worked.
        submit_s: Time that the host spent on submission.
        is_hidden: Whether submission completed before the device started, so that `device_s` contains
            only the device's work.
    """

    device_s: float
    submit_s: float
    is_hidden: bool


def median_times(*functions: Callable[[], object], rounds: int = 7) -> list[float]:
    """Return each function's median time per call in seconds.

    Calls are interleaved, so that noise affects all functions equally.
    """
    times: list[list[float]] = [[] for _ in functions]
    for function in functions:
        function()  # warm caches, allocator and branch predictor
    for _ in range(rounds):
        for function, taken in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in times]


class Pools:
    """A pool on a device and an equal pool in host memory, pinned for that device.

    Both are allocated once, and can be viewed as pages with fragments of any size.

    Args:
        device: The device. If it is the CPU, both pools are in pageable host memory.
        num_bytes: Bytes per swap.
        pool_bytes: Minimum size of each pool, in bytes. Swapped pages are scattered over the pools.

    Example:
        >>> pools = Pools(torch.device("cpu"), num_bytes=1 << 20, pool_bytes=8 << 20)
        >>> pages, host = pools.pages(4096)
        >>> pages.num_blocks, host.num_blocks, pages.page_bytes
        (384, 384, 65536)
        >>> len(pools.pairs(pages))  # pages that move 1 MiB
        16
    """

    def __init__(self, device: torch.device, num_bytes: int, pool_bytes: int = POOL_BYTES) -> None:
        self.device, self.num_bytes = device, num_bytes
        self.size = pool_size(num_bytes, pool_bytes)
        self._largest = _page_bytes(max(FRAGMENTS), num_bytes)
        pin_for = device if device.type == "cuda" else None
        host = allocate_host(self.size // self._largest, self._largest, pin_for)
        self._host, self._per_chunk, self._keep = host
        self._memory = torch.empty(self.size, dtype=torch.uint8, device=device)
        # Unwritten host memory maps to a single page of zeros, which would stay in the CPU caches.
        self._memory.random_(0, 256)
        self._host.fill_(1)
        self._contiguous: dict[str, float] = {}

    def pages(self, fragment: int) -> tuple[Pages, Pages]:
        """Return both pools as pages with a K and a V fragment in each of up to 16 layers."""
        page = _page_bytes(fragment, self.num_bytes)
        num_blocks, number = self.size // page, np.arange(page // fragment)
        sizes = np.full(len(number), fragment)
        layers = number // 2
        offsets = number * fragment * num_blocks
        pages = Pages(self._memory, num_blocks, offsets, sizes, sizes, layers)
        host = Pages(
            self._host,
            num_blocks,
            number * fragment,
            np.full(len(number), page),
            sizes,
            layers,
            keep=self._keep,
            pages_per_chunk=self._per_chunk * (self._largest // page),
        )
        return pages, host

    def pairs(self, pages: Pages) -> np.ndarray:
        """Return pairs of pages that move `num_bytes`, scattered over both pools. int32[n, 2]."""
        chance = np.random.default_rng(0)
        count = _num_moved(pages.page_bytes, self.num_bytes)
        ids = [chance.permutation(pages.num_blocks - 1)[:count] + 1 for _ in range(2)]
        return np.stack(ids, axis=1).astype(np.int32)

    def contiguous_gb_per_s(self, direction: str) -> float:
        """Return the bandwidth of a contiguous copy between pinned memory and the device or, for
        "both", of two copies of half the size. It is measured once.
        """
        if direction not in self._contiguous:
            found = _contiguous_gb_per_s(self.device, self.num_bytes, direction)
            self._contiguous[direction] = found
        return self._contiguous[direction]


def pool_size(num_bytes: int, pool_bytes: int) -> int:
    """Return the size of each pool of `Pools`: a multiple of the largest page, with one page more
    than a swap moves, because the null block is not moved.
    """
    largest = _page_bytes(max(FRAGMENTS), num_bytes)
    least = (_num_moved(largest, num_bytes) + 1) * largest
    return -(-max(pool_bytes, least) // largest) * largest


def _page_bytes(fragment: int, num_bytes: int) -> int:
    """Return the size of a page with 2 fragments in each of 1, 2, 4, 8 or 16 layers. The size is a
    factor of that of pages with larger fragments.
    """
    layers = min(max(num_bytes // (32 * fragment), 1), 16)
    return 2 * fragment << (layers.bit_length() - 1)


def _num_moved(page_bytes: int, num_bytes: int) -> int:
    return max(num_bytes // page_bytes, 2)


def host_rates(num_bytes: int, fragments: Sequence[int] | None = None) -> Iterator[Rate]:
    """Measure copies of scattered pages within host memory, with as many threads as torch uses."""
    whole = _memcpy(num_bytes, torch.get_num_threads())
    pools = Pools(torch.device("cpu"), num_bytes, 0)
    for fragment in fragments or FRAGMENTS:
        source, host = pools.pages(fragment)
        page_copy, pairs = PageCopy(source, host), pools.pairs(source)
        copy, memcpy = median_times(lambda: page_copy.copy(pairs), whole)  # noqa: B023
        moved = len(pairs) * source.page_bytes
        yield Rate(HOST, fragment, "cpu", moved / copy / 1e9, num_bytes / memcpy / 1e9)


def host_rates_bytes(num_bytes: int) -> int:
    """Return the peak number of bytes that `host_rates` needs for both sides of the page copy and
    of the contiguous copy.
    """
    return 2 * pool_size(num_bytes, 0) + 2 * num_bytes


def device_rates_bytes(num_bytes: int, pool_bytes: int = POOL_BYTES) -> tuple[int, int]:
    """Return the peak memory that `device_rates` needs, as (device bytes, host bytes).

    Both numbers include the memory of the contiguous copy, which torch's allocators keep. The
    device bytes also include both directions' staging memory.
    """
    pool, page = pool_size(num_bytes, pool_bytes), _page_bytes(max(FRAGMENTS), num_bytes)
    return pool + num_bytes + 2 * max(_STAGING_BYTES, 2 * page), pool + num_bytes


def device_rates(
    pools: Pools,
    fragments: Sequence[int] | None = None,
    methods: tuple[str | None, ...] = (None,),
    calibration: Calibration | None = None,
    directions: tuple[str, ...] = (OUT, IN, BOTH),
    rounds: int = 7,
    counts: tuple[int, ...] = (),
    thread_blocks: tuple[int, ...] = (),
) -> Iterator[Rate]:
    """Measure swaps of scattered pages between a device and pinned host memory.

    Args:
        pools: The memory on both sides.
        fragments: Fragment sizes in bytes. None: `FRAGMENTS`.
        methods: Copy methods to measure. None: the method that the calibration selects.
        calibration: The calibration. None: this machine's calibration.
        directions: Directions to measure.
        rounds: Repetitions per measurement.
        counts: Numbers of fragments per swap. If given, swaps with these numbers of fragments are
            measured, and the pools' `num_bytes` is only an upper limit on their size.
        thread_blocks: Numbers of thread blocks to compare. Empty: use the calibration's number.

    Yields:
        One result per combination of these arguments.
    """
    base = calibration or calibration_of(pools.device)
    trials = [replace(base, num_thread_blocks=n) for n in thread_blocks] or [base]
    for fragment in fragments or FRAGMENTS:
        pages, host = pools.pages(fragment)
        pairs, per_page = pools.pairs(pages), len(pages.sizes)
        numbers = {min(max(count // per_page, 1), len(pairs)) for count in counts}
        for method, trial in product(methods, trials):
            engine = SwapEngine(
                pages, host, method=method, calibration=trial, staging_bytes=_STAGING_BYTES
            )
            for direction, number in product(directions, sorted(numbers or {len(pairs)})):
                some = pairs[:number]
                timing = _swap_timing(engine, some, direction, rounds)
                used = method or _methods(engine, some, direction)
                yield Rate(
                    direction,
                    fragment,
                    used,
                    # For "both", each direction moves half of the bytes.
                    number * pages.page_bytes / timing.device_s / 1e9,
                    pools.contiguous_gb_per_s(direction),
                    engine.calibration.num_thread_blocks if used == KERNEL else None,
                    number * per_page,
                    timing.submit_s * 1e6,
                    timing.is_hidden,
                )
            del engine  # frees the staging memory before the next engine is created


def calibrate(pools: Pools, progress: Callable[[Rate], None] = lambda rate: None) -> Calibration:
    """Determine the copy methods with the highest sustained bandwidth, and the smallest number of
    thread blocks that reaches nearly the maximum bandwidth.

    Args:
        pools: The memory on both sides.
        progress: Called with each measurement.

    Returns:
        This machine's calibration.
    """
    by_blocks: dict[int | None, float] = {}
    for rate in device_rates(
        pools, (16 << 10,), (KERNEL,), DEFAULT, (IN,), rounds=5, thread_blocks=_THREAD_BLOCKS
    ):
        progress(rate)
        by_blocks[rate.num_thread_blocks] = rate.gb_per_s
    enough = 0.97 * max(by_blocks.values())
    blocks = min(n for n, rate in by_blocks.items() if rate >= enough)
    trial = Calibration("trial", DEFAULT.out, DEFAULT.in_, blocks)
    best: dict[tuple[str, int, int], Rate] = {}
    for rate in device_rates(pools, FRAGMENTS, METHODS, trial, DIRECTIONS, 5, _COUNTS):
        progress(rate)
        case = (rate.direction, rate.fragment, rate.num_fragments)
        # Select another method only if it is clearly faster, so that noise does not create steps.
        if case not in best or rate.sustained_gb_per_s > 1.03 * best[case].sustained_gb_per_s:
            best[case] = rate

    def method(direction: str, size: int, count: int) -> str:
        """Return the method that was fastest for the measured number of fragments nearest to `count`."""
        numbers = [n for way, fragment, n in best if (way, fragment) == (direction, size)]
        return best[direction, size, min(numbers, key=lambda n: abs(n - count))].method

    tables = {
        direction: steps_of(
            (count, steps_of((size, method(direction, size, count)) for size in FRAGMENTS))
            for count in _COUNTS
        )
        for direction in DIRECTIONS
    }
    name = torch.cuda.get_device_name(pools.device)
    return Calibration(name, tables[OUT], tables[IN], blocks)


def steps_of(measured: Iterable[tuple[int, T]]) -> tuple[tuple[int, T], ...]:
    """Convert measured (size or number, best choice) pairs to ascending steps.

    Each step begins halfway between two measured values.
    """
    steps: list[tuple[int, T]] = []
    before = 0
    for size, best in measured:
        if not steps:
            steps.append((0, best))
        elif steps[-1][1] != best:
            steps.append(((before + size) // 2, best))
        before = size
    return tuple(steps)


def _methods(engine: SwapEngine, pairs: np.ndarray, direction: str) -> str:
    """Return the method of a swap or, for "both", the methods of both halves if they differ."""
    if direction != BOTH:
        return engine.method_for(direction, pairs)
    half = len(pairs) // 2
    out, into = engine.method_for(OUT, pairs[:half]), engine.method_for(IN, pairs[half:, ::-1])
    return out if out == into else f"{out}, {into}"


def _swap_timing(engine: SwapEngine, pairs: np.ndarray, direction: str, rounds: int) -> Timing:
    half = len(pairs) // 2

    def swap() -> None:
        if direction == BOTH:
            jobs = [engine.swap_out(pairs[:half]), engine.swap_in(pairs[half:, ::-1])]
        elif direction == OUT:
            jobs = [engine.swap_out(pairs)]
        else:
            jobs = [engine.swap_in(pairs[:, ::-1])]
        for job in jobs:
            engine.before_read(job)

    with torch.cuda.device(engine.device.device):
        timing = device_seconds(swap, rounds)
    engine.wait()
    return timing


def hold(seconds: float) -> None:
    """Block the current stream for at least this many seconds without blocking the host."""
    torch.cuda._sleep(int(seconds * _MOST_CYCLES_PER_S))


def device_seconds(launch: Callable[[], object], rounds: int = 7) -> Timing:
    """Measure the device time of the work that `launch` submits. The current stream must wait for
    this work.

    The stream is blocked until all work is submitted, so that submission time does not count. If
    the hold ends before submission is complete, the round is repeated with a longer hold.
    """
    stream = torch.cuda.current_stream()
    rounds_left, repeats_left = 1 + rounds, rounds  # the first round warms caches and allocator
    hold_s, taken, submitting, is_hidden = _LEAST_HOLD_S, [], [], True
    while rounds_left:
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        hold(hold_s)
        start.record(stream)
        begin = time.perf_counter()
        launch()
        submit_s = time.perf_counter() - begin
        end.record(stream)
        came_first = start.query()
        end.synchronize()
        hold_s = min(2 * submit_s + _LEAST_HOLD_S, _MOST_HOLD_S)
        if came_first and repeats_left and rounds_left <= rounds:
            repeats_left -= 1
            continue
        if rounds_left <= rounds:
            taken.append(start.elapsed_time(end) / 1e3)
            submitting.append(submit_s)
            is_hidden = is_hidden and not came_first
        rounds_left -= 1
    return Timing(statistics.median(taken), statistics.median(submitting), is_hidden)


def _contiguous_gb_per_s(device: torch.device, num_bytes: int, direction: str) -> float:
    host = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    on_device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    current = torch.cuda.current_stream(device)
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    half = num_bytes // 2

    def copy() -> None:
        for stream in streams:
            stream.wait_stream(current)
        with torch.cuda.stream(streams[0]):
            if direction == OUT:
                host.copy_(on_device, non_blocking=True)
            elif direction == IN:
                on_device.copy_(host, non_blocking=True)
            else:
                host[:half].copy_(on_device[:half], non_blocking=True)
        if direction == BOTH:
            with torch.cuda.stream(streams[1]):
                on_device[half:].copy_(host[half:], non_blocking=True)
        for stream in streams:
            current.wait_stream(stream)

    with torch.cuda.device(device):
        return num_bytes / device_seconds(copy).device_s / 1e9


def _memcpy(num_bytes: int, num_threads: int) -> Callable[[], None]:
    """Return a function that performs a contiguous copy with the C library, split across threads."""
    source, target = (torch.ones(num_bytes, dtype=torch.uint8, device="cpu") for _ in range(2))
    cuts = np.linspace(0, num_bytes, num_threads + 1).astype(np.int64).tolist()
    pool = ThreadPoolExecutor(num_threads)

    def copy_part(part: int) -> None:
        begin, end = cuts[part], cuts[part + 1]
        # ctypes releases the GIL.
        ctypes.memmove(target.data_ptr() + begin, source.data_ptr() + begin, end - begin)

    def copy() -> None:
        list(pool.map(copy_part, range(num_threads)))

    return copy
