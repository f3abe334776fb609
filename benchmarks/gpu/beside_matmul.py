# SPDX-License-Identifier: Apache-2.0
"""Stage: measures how much swaps and bf16 matrix multiplications slow each other down.

Both are timed with CUDA events. The matrix multiplications run on one stream, like the kernels of
an engine. Several swaps are in flight at any time until the multiplications are done.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product

import numpy as np
import torch

from benchmarks.gpu import say, sizes
from benchmarks.gpu.swaps import calibrated
from benchmarks.gpu.timing import stream_seconds
from kvcache.worker.pages.pages import Pages
from kvcache.worker.swap.calibration import METHODS
from kvcache.worker.swap.engine import SwapEngine

_WIDTH = 8192  # size of the square matrices
_NUM_PRODUCTS = 60  # about 80 ms at 800 TFLOP/s
_FRAGMENT, _LAYERS = 16 << 10, 16
_SWAPPED = 64 << 20  # bytes per swap
_IN_FLIGHT = 3
_DIRECTIONS = ("out", "in", "both")


def main() -> int:
    with say.timed("matmul"):
        products = Products()
    say.row(kind="matmul", width=products.width, tflop_per_s=products.tflop_per_s)
    say.learned(f"bf16 product of {products.width:,}: {products.tflop_per_s:.0f} TFLOP/s alone")
    page_bytes = 2 * _LAYERS * _FRAGMENT
    num_blocks = sizes.pool_bytes(2 << 30, 4 << 20) // page_bytes
    with say.timed("pools"):
        pages = Pages.allocate(num_blocks, [[_FRAGMENT, _FRAGMENT]] * _LAYERS, device="cuda")
        host = pages.on_host(num_blocks)
        host.memory.fill_(7)
    count = min(max(sizes.scaled(_SWAPPED) // page_bytes, 2), num_blocks - 1)
    used = calibrated()
    for method, direction in product(METHODS, _DIRECTIONS):
        if say.seconds_left() < 3:
            say.skipped(f"{method} {direction}: no time left")
            continue
        with say.attempt(f"{method} {direction}"):
            engine = SwapEngine(pages, host, method=method, calibration=used)
            measure(Swaps(engine, direction, count), products, method)
    return say.exit_code()


class Products:
    """A sequence of matrix products on its own stream."""

    def __init__(self) -> None:
        self.width = 64 if sizes.REHEARSAL else _WIDTH
        self._count = sizes.repeats(_NUM_PRODUCTS)
        drawn = [torch.randn(self.width, self.width, device="cuda") for _ in "ab"]
        self._factors = [each.bfloat16() for each in drawn]
        self._product = torch.empty_like(self._factors[0])
        self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        self.alone_s = stream_seconds(self._multiply, self._stream)

    @property
    def tflop_per_s(self) -> float:
        """Measure the products alone."""
        return 2 * self.width**3 * self._count / self.alone_s / 1e12

    def start(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Launch the products, and return the events at their start and end."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            start.record()
            self._multiply()
            end.record()
        return start, end

    def _multiply(self) -> None:
        for _ in range(self._count):
            torch.matmul(*self._factors, out=self._product)


class Swaps:
    """Consecutive swaps of one engine in one direction."""

    def __init__(self, engine: SwapEngine, direction: str, count: int) -> None:
        self.engine, self.direction = engine, direction
        chance = np.random.default_rng(0)
        drawn = [chance.permutation(engine.device.num_blocks - 1)[:count] + 1 for _ in range(2)]
        self._pairs = np.stack(drawn, 1)
        self.num_bytes = count * engine.device.page_bytes  # bytes per swap

    def gb_per_s(self, is_over: Callable[[int], bool]) -> float:
        """Run at least one swap, and continue until `is_over(number of swaps)` is true."""
        stream, count = torch.cuda.Stream(), 0
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        jobs: list = []
        with torch.cuda.stream(stream):
            start.record()
            while count == 0 or not is_over(count):
                jobs += self._one()
                count += 1
                if count > _IN_FLIGHT:
                    jobs[-1 - _IN_FLIGHT].wait(20)
            for job in jobs[-2 * _IN_FLIGHT :]:
                self.engine.before_read(job)  # the stream waits for the job, in either direction
            end.record()
        self.engine.wait(20)
        end.synchronize()
        return count * self.num_bytes / max(start.elapsed_time(end), 1e-6) / 1e6

    def _one(self) -> list:
        half = len(self._pairs) // 2
        if self.direction == "both":
            out = self.engine.swap_out(self._pairs[:half])
            return [out, self.engine.swap_in(self._pairs[half:, ::-1])]
        if self.direction == "out":
            return [self.engine.swap_out(self._pairs)]
        return [self.engine.swap_in(self._pairs[:, ::-1])]


def measure(swaps: Swaps, products: Products, method: str) -> None:
    """Measure swaps alone, then during the products."""
    few = sizes.repeats(8)
    swaps.gb_per_s(lambda count: count >= 2)  # warm up
    alone = swaps.gb_per_s(lambda count: count >= few)
    start, end = products.start()
    beside = swaps.gb_per_s(lambda _: end.query())
    end.synchronize()
    slower = start.elapsed_time(end) / 1e3 / products.alone_s
    say.row(
        kind="beside", method=method, direction=swaps.direction, matmul_slowdown=slower,
        swap_slowdown=alone / beside, swap_gb_per_s_alone=alone, swap_gb_per_s_beside=beside,
    )  # fmt: skip
    say.learned(
        f"{method} {swaps.direction}: the product takes {slower:.2f} times as long, a swap "
        f"{alone / beside:.2f} times ({beside:.1f} GB/s beside it)"
    )


if __name__ == "__main__":
    say.ready()
    sys.exit(main())
