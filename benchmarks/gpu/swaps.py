# SPDX-License-Identifier: Apache-2.0
"""Stage: measures the bandwidth of swaps before and after calibration, of kernels on the bus with
different numbers of thread blocks, and of batches of the copy engine.

All measurements use one pool in host memory and one on the device, and are compared with a
contiguous pinned copy. With `--again`, only the swaps are measured, twice, with the calibration of
the first lease.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path

import torch

from benchmarks.gpu import say, sizes
from benchmarks.gpu.timing import stream_seconds, stream_timing
from kvcache import ops
from kvcache.worker.pages.page_copy import PageCopy
from kvcache.worker.pages.pinning import allocate_host
from kvcache.worker.swap import calibration
from kvcache.worker.swap.calibration import DEFAULT, Calibration
from kvcache.worker.swap.engine import SwapEngine
from kvcache_lab import bandwidth
from kvcache_lab.bandwidth import Pools

_BYTES = 256 << 20  # bytes moved per measurement
_LEAST_S = 1.0  # minimum time left to start a measurement
_TOLD = (4 << 10, 16 << 10, 1 << 20)  # sizes of fragments that are reported to the user
THREAD_BLOCKS = (1, 2, 3, 4, 8, 16, 32)
SWEPT = (4 << 10, 16 << 10, 64 << 10)  # sizes of fragments
_SWEPT_BYTES = 128 << 20  # bytes per measurement
_BATCHES = (256, 512, 1024, 2048, 4096)
DIRECTIONS = ("out", "in")


def main(arguments: list[str]) -> int:
    pools = make_pools(_BYTES)
    if arguments == ["--again"]:
        for number in range(2):
            with say.attempt(f"swaps, run {number + 1}"):
                report_swaps(pools, calibrated())
        return say.exit_code()
    # The figures with targets are measured first, with the built-in calibration, so that they are
    # always available.
    with say.attempt("swaps"):
        report_swaps(pools, DEFAULT)
    found: list[Calibration] = []
    with say.attempt("calibration"):
        found.append(bandwidth.calibrate(pools, report_trial))
        report(found[0])
    with say.attempt("swaps as calibrated"):
        if found:
            report_swaps(pools, found[0])
    stream = torch.cuda.Stream()
    with say.attempt("beside a loop of copies"):
        beside_a_loop(pools, stream)
    with say.attempt("batches"):
        batches(pools, stream)
    with say.attempt("thread blocks"):
        report_sweep(list(sweep(pools, stream)))
    return say.exit_code()


def make_pools(num_bytes: int) -> Pools:
    """Allocate both pools, and report how long that took."""
    num_bytes = sizes.scaled(num_bytes, 256 << 10)
    pool_bytes = sizes.pool_bytes(bandwidth.POOL_BYTES)
    if sizes.REHEARSAL:  # the pools are small; the time of full ones is known before a lease
        with say.timed("pinning of a full pool"):
            allocate_host(bandwidth.POOL_BYTES >> 20, 1 << 20, torch.device("cuda"))
    with say.timed("pools"):
        pools = Pools(torch.device("cuda", torch.cuda.current_device()), num_bytes, pool_bytes)
        torch.cuda.synchronize()
    return pools


def report_swaps(pools: Pools, used: Calibration) -> None:
    """Measure swaps with the calibration's methods until the time is used up.

    Results are reported immediately.
    """
    is_built_in = used is DEFAULT
    for rate in bandwidth.device_rates(pools, calibration=used, rounds=sizes.repeats(7)):
        say.row(kind="swap", **asdict(rate), share=rate.share, calibrated=not is_built_in)
        if rate.fragment in _TOLD:
            say.learned(
                f"swap {rate.direction}, {rate.fragment >> 10:,} KiB by {rate.method}"
                f"{'' if is_built_in else ', calibrated'}: "
                f"{rate.gb_per_s:.1f} of {rate.contiguous_gb_per_s:.1f} GB/s, {rate.share:.0%}; "
                f"submitted in {rate.submit_us or 0:.0f} us"
            )
        if say.seconds_left() < _LEAST_S:
            say.skipped(f"swaps after {rate.fragment >> 10:,} KiB: no time left")
            return


def report_trial(rate: bandwidth.Rate) -> None:
    """Report one trial of the calibration. The calibration ends when no time is left."""
    say.row(kind="trial", **asdict(rate), share=rate.share)
    if say.seconds_left() < _LEAST_S:
        raise TimeoutError("no time left")


def report(found: Calibration) -> None:
    """Save a calibration with the results, without changing the user's own file."""
    path = os.environ.get("KVCACHE_CALIBRATION_TO")
    if path:
        found.save(Path(path))
    say.row(kind="calibration", **asdict(found))
    for direction, table in (("out", found.out), ("in", found.in_)):
        _, steps = table[-1]  # the entry for swaps with many fragments
        text = ", ".join(f"from {size >> 10:,} KiB {method}" for size, method in steps)
        say.learned(f"{direction}, many fragments: {text}")
    say.learned(f"{found.num_thread_blocks} thread blocks are enough for the kernel on the bus")


def calibrated() -> Calibration:
    """Return the calibration saved by this lease or the first, or the built-in calibration."""
    path = Path(os.environ.get("KVCACHE_CALIBRATION_TO", ""))
    if path.is_file():
        return calibration.load(path)
    say.learned(f"no calibration in {path}: the built-in one is used")
    return calibration.DEFAULT


def beside_a_loop(pools: Pools, stream: torch.cuda.Stream) -> None:
    """Measure 16 MiB in fragments of 16 KiB, from the call to the end, by a swap and by one torch copy
    per fragment.
    """
    pages, host = pools.pages(16 << 10)
    pairs = pools.pairs(pages)[: max(sizes.scaled(16 << 20) // pages.page_bytes, 1)]
    fragments = [(pages.fragment(r), host.fragment(r)) for r in range(len(pages.sizes))]
    engine = SwapEngine(pages, host)

    def loop() -> None:
        for there, here in pairs.tolist():
            for on_device, on_host in fragments:
                on_host[here].copy_(on_device[there], non_blocking=True)

    def swap() -> None:
        engine.before_read(engine.swap_out(pairs))

    found = {}
    with torch.cuda.stream(stream):
        for name, call in {"swap": swap, "loop": loop}.items():
            times = []
            for _ in range(1 + sizes.repeats(7)):
                start = time.perf_counter()
                call()
                stream.synchronize()
                times.append(time.perf_counter() - start)
            found[name] = statistics.median(times[1:])
    engine.wait(20)
    num_bytes = len(pairs) * pages.page_bytes
    say.row(kind="loop", bytes=num_bytes, swap_s=found["swap"], loop_s=found["loop"])
    say.learned(
        f"{num_bytes >> 20:,} MiB out in 16 KiB: {num_bytes / found['swap'] / 1e9:.1f} GB/s, one torch "
        f"copy per fragment {num_bytes / found['loop'] / 1e9:.2f} GB/s"
    )


def batches(pools: Pools, stream: torch.cuda.Stream) -> None:
    """Measure the copy engine's cost per call and bandwidth for different numbers of 16 KiB pieces
    per call.
    """
    pages, host = pools.pages(16 << 10)
    per_page = len(pages.sizes)
    for direction, wanted in product(DIRECTIONS, _BATCHES):
        pairs = pools.pairs(pages)[: max(wanted // per_page, 1)]
        size = len(pairs) * per_page
        page_copy = PageCopy(pages, host) if direction == "out" else PageCopy(host, pages)
        timing = stream_timing(partial(page_copy.copy, pairs, engine=ops.COPY_ENGINE), stream, 7)
        submit_us, gb_per_s = timing.submit_s * 1e6, size * (16 << 10) / timing.device_s / 1e9
        say.row(
            kind="batch", direction=direction, pieces=size, submit_us=submit_us,
            submit_us_per_piece=submit_us / size, gb_per_s=gb_per_s, hidden=timing.is_hidden,
        )  # fmt: skip
        if wanted == max(_BATCHES):
            say.learned(
                f"copy engine {direction}, {size:,} pieces of 16 KiB: submitted in "
                f"{submit_us:.0f} us, {gb_per_s:.1f} GB/s"
            )


def sweep(pools: Pools, stream: torch.cuda.Stream) -> Iterator[dict]:
    """Measure the kernel on the bus for all fragment sizes and numbers of thread blocks."""
    for fragment in SWEPT:
        pages, host = pools.pages(fragment)
        count = max(min(sizes.scaled(_SWEPT_BYTES) // pages.page_bytes, pages.num_blocks - 1), 1)
        pairs = pools.pairs(pages)[:count]
        for direction, blocks in product(DIRECTIONS, THREAD_BLOCKS):
            if say.seconds_left() < _LEAST_S:
                say.skipped(f"thread blocks, {fragment >> 10:,} KiB: no time left")
                return
            # Pages are random on both sides, so both directions can use the same list.
            page_copy = PageCopy(pages, host) if direction == "out" else PageCopy(host, pages)
            copy = partial(page_copy.copy, pairs, num_thread_blocks=blocks)
            rate = len(pairs) * pages.page_bytes / stream_seconds(copy, stream, 3) / 1e9
            limit = pools.contiguous_gb_per_s(direction)
            row = {"direction": direction, "fragment": fragment, "thread_blocks": blocks}
            row |= {"gb_per_s": rate, "of_contiguous": rate / limit}
            say.row(kind="sweep", **row)
            yield row


def report_sweep(rows: list[dict]) -> None:
    """Report the fastest number of thread blocks for each direction and fragment size."""
    for direction, fragment in product(DIRECTIONS, SWEPT):
        case = {"direction": direction, "fragment": fragment}
        found = [row for row in rows if case.items() <= row.items()]
        if found:
            best = max(found, key=lambda row: row["gb_per_s"])
            few = next(r for r in found if r["gb_per_s"] >= 0.97 * best["gb_per_s"])
            say.learned(
                f"kernel {direction}, {fragment >> 10} KiB: at most "
                f"{best['gb_per_s']:.1f} GB/s, {best['of_contiguous']:.0%}; within 3 % of it from "
                f"{few['thread_blocks']} thread blocks"
            )


if __name__ == "__main__":
    say.ready()
    sys.exit(main(sys.argv[1:]))
