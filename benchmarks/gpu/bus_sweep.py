# SPDX-License-Identifier: Apache-2.0
"""Stage: measures the bus bandwidth of kernels and of batched copies.

The kernels' bandwidth is measured for several numbers of thread blocks, fragment sizes and pool
sizes, with and without huge pages.

Every result is compared with a contiguous pinned copy. Copies run on a separate stream and are
timed with CUDA events.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu import say, sizes, switches
from benchmarks.gpu.timing import stream_seconds, stream_timing
from kvcache import ops
from kvcache.worker.pages.page_copy import PageCopy
from kvcache.worker.pages.pages import Pages
from kvcache.worker.pages.pinning import allocate_host

_THREAD_BLOCKS = (1, 2, 4, 8, 16, 32)
_FRAGMENTS = (4 << 10, 16 << 10, 64 << 10)
_POOLS = (256 << 20, 16 << 30)
_MOVED = 128 << 20  # bytes per measurement
_REGIONS = 32  # K and V of 16 layers
_BATCHES = (256, 512, 1024, 2048, 4096)
_DIRECTIONS = ("out", "in")
_PR_SET_THP_DISABLE = 41


def main() -> int:
    device = torch.device("cuda", torch.cuda.current_device())
    stream = torch.cuda.Stream(device)
    limits = {}
    with say.attempt("contiguous copy"):
        limits = contiguous(stream)
    with say.attempt("batches"):
        batches(device, stream)
    best: dict[tuple, dict] = {}
    for wanted in _POOLS:
        for huge in (True, False):
            if say.seconds_left() < 8:
                say.skipped(f"pool of {wanted >> 20:,} MiB, huge pages {huge}: no time left")
                continue
            with say.attempt(f"pool of {wanted >> 20:,} MiB, huge pages {huge}"):
                for row in sweep(device, stream, wanted, huge):
                    limit = limits.get(row["direction"])
                    row["of_contiguous"] = row["gb_per_s"] / limit if limit else None
                    say.row(kind="sweep", **row)
                    key = (row["direction"], row["pool"], row["huge_pages"], row["bulk"])
                    if key not in best or row["gb_per_s"] > best[key]["gb_per_s"]:
                        best[key] = row
            gc.collect()
            torch.cuda.empty_cache()
    for (direction, pool, huge, bulk), row in best.items():
        say.learned(
            f"{'bulk copies' if bulk else 'kernel'} {direction}, pool {pool >> 20:,} MiB, "
            f"{'huge' if huge else 'small'} pages: at most "
            f"{row['gb_per_s']:.1f} GB/s ({row['fragment'] >> 10} KiB, {row['thread_blocks']} blocks)"
        )
    return say.exit_code()


def contiguous(stream: torch.cuda.Stream) -> dict[str, float]:
    """Return the bandwidth of a contiguous pinned copy by direction, in GB/s."""
    num_bytes = sizes.scaled(256 << 20)
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    host.fill_(1)
    torch.cuda.synchronize()
    found = {}
    for direction, (target, source) in {"out": (host, there), "in": (there, host)}.items():
        copy = partial(target.copy_, source, non_blocking=True)
        found[direction] = num_bytes / stream_seconds(copy, stream) / 1e9
        say.row(kind="contiguous", direction=direction, gb_per_s=found[direction])
    say.learned(f"one contiguous pinned copy: out {found['out']:.1f}, in {found['in']:.1f} GB/s")
    return found


def sweep(
    device: torch.device, stream: torch.cuda.Stream, wanted: int, huge: bool
) -> Iterator[dict]:
    """Measure all fragment sizes and thread block counts between a pinned pool and a device
    pool.
    """
    largest = max(_FRAGMENTS) * _REGIONS
    pool = sizes.pool_bytes(wanted, 2 * largest)
    start = time.monotonic()
    with contextlib.nullcontext() if huge else small_pages_only():
        memory, per_chunk, keep = allocate_host(pool // largest, largest, device)
    seconds = time.monotonic() - start
    is_huge = huge_bytes(memory)
    say.row(kind="pinned", pool=pool, huge_pages=huge, seconds=seconds, huge_bytes=is_huge)
    say.learned(
        f"{pool >> 20:,} MiB of host memory pinned in {seconds:.1f} s, "
        f"{'unknown' if is_huge is None else f'{is_huge >> 20:,} MiB'} in huge pages"
    )
    memory.fill_(7)
    chance = np.random.default_rng(0)
    for fragment in _FRAGMENTS:
        page = fragment * _REGIONS
        num_blocks = pool // page
        there = Pages.allocate(num_blocks, [[fragment, fragment]] * (_REGIONS // 2), device=device)
        here = packed(memory, num_blocks, fragment, per_chunk * (largest // page), keep)
        count = max(min(sizes.scaled(_MOVED) // page, num_blocks), 1)
        pairs = np.stack([chance.permutation(num_blocks)[:count] for _ in range(2)], 1)
        page_copies = {"out": PageCopy(there, here), "in": PageCopy(here, there)}
        # Bulk copies are measured in only one of the pools.
        trials = (False, True) if huge and wanted == min(_POOLS) else (False,)
        for direction, bulk, blocks in product(_DIRECTIONS, trials, _THREAD_BLOCKS):
            # Pages are random on both sides, so both directions can use the same list.
            copy = partial(page_copies[direction].copy, pairs, num_thread_blocks=blocks)
            with switches.bulk_copies(bulk):
                taken = stream_seconds(copy, stream, 3)
            yield {
                "direction": direction, "pool": pool, "huge_pages": huge, "fragment": fragment,
                "bulk": bulk, "thread_blocks": blocks, "gb_per_s": count * page / taken / 1e9,
            }  # fmt: skip
        del there, here, page_copies, copy


def packed(
    memory: torch.Tensor, num_blocks: int, fragment: int, pages_per_chunk: int, keep: object
) -> Pages:
    """Return host pages in the given memory. Each page's fragments are contiguous."""
    return Pages(
        memory,
        num_blocks,
        np.arange(_REGIONS) * fragment,
        np.full(_REGIONS, fragment * _REGIONS),
        np.full(_REGIONS, fragment),
        np.arange(_REGIONS) // 2,
        keep=keep,
        pages_per_chunk=pages_per_chunk,
    )


@contextlib.contextmanager
def small_pages_only() -> Iterator[None]:
    """Disable huge pages for memory that is mapped and touched in the block, even if they are
    requested.
    """
    prctl = ctypes.CDLL(None).prctl
    switched = prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
    if not switched:
        say.learned("this system does not allow a process to disable huge pages")
    try:
        yield
    finally:
        if switched:
            prctl(_PR_SET_THP_DISABLE, 0, 0, 0, 0)


def huge_bytes(memory: torch.Tensor) -> int | None:
    """Return the number of bytes that are mapped with huge pages, or None if the system does not
    report this number.
    """
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return None
    inside, found = False, 0
    for line in lines:
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds:
            low, high = (int(bound, 16) for bound in bounds.groups())
            inside = low < memory.data_ptr() + memory.numel() and memory.data_ptr() < high
        elif inside and line.startswith("AnonHugePages:"):
            found += int(line.split()[1]) << 10
    return found


def batches(device: torch.device, stream: torch.cuda.Stream) -> None:
    """Measure the copy engine's cost per call and bandwidth for different numbers of 16 KiB pieces
    per call.
    """
    fragment = 16 << 10
    num_blocks = 2 * max(_BATCHES)
    there = Pages.allocate(num_blocks, [[fragment]], device=device)
    here = there.on_host(num_blocks)
    here.memory.fill_(7)
    chance = np.random.default_rng(1)
    for direction in _DIRECTIONS:
        page_copy = PageCopy(there, here) if direction == "out" else PageCopy(here, there)
        for size in _BATCHES:
            # Use only even pages, because adjacent pages would be merged.
            pairs = np.stack([chance.permutation(num_blocks // 2)[:size] * 2 for _ in range(2)], 1)
            copy = partial(page_copy.copy, pairs, engine=ops.COPY_ENGINE)
            timing = stream_timing(copy, stream, 7)
            submit_us = timing.submit_s * 1e6
            gb_per_s = size * fragment / timing.device_s / 1e9
            say.row(
                kind="batch", direction=direction, pieces=size, submit_us=submit_us,
                submit_us_per_piece=submit_us / size, gb_per_s=gb_per_s, hidden=timing.is_hidden,
            )  # fmt: skip
            if size == max(_BATCHES):
                say.learned(
                    f"copy engine {direction}, {size:,} pieces of 16 KiB: submitted in "
                    f"{submit_us:.0f} us, {gb_per_s:.1f} GB/s"
                )


if __name__ == "__main__":
    sys.exit(main())
