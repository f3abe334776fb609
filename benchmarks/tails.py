# SPDX-License-Identifier: Apache-2.0
"""Measures percentiles of the CPU times of decode steps and admissions, including page faults.

Each call is followed by a busy loop of about the same duration. Delays that also occur in this loop
are caused by the machine. `python -m benchmarks.tails` measures 100,000 steps per pool, of up to ten
million blocks, and takes minutes. `make bench` runs a short version.
"""

from __future__ import annotations

import gc
import itertools
import resource
from collections import deque
from collections.abc import Callable, Iterator
from time import thread_time_ns

import numpy as np

from benchmarks.measure import HEADER, Result
from kvcache import KVCacheManager, Request

BLOCK, PROMPT_BLOCKS, LONG = 16, 1024, 1_000_000
MOST_BLOCKS = 99_999 // BLOCK  # blocks of the largest call that should stay below MOST_US
MOST_US, MOST_RATIO = 1000, 5  # upper bounds for the slowest call, and for p99.9 divided by p50
FULL = {20_000: 64, 1_000_000: 256, 10_000_000: 256}  # pool size in blocks -> number of decode rows
SHORT = {20_000: 64, 1_000_000: 256}


def all_results() -> Iterator[Result]:
    """Measure the short version."""
    yield from results(SHORT, num_steps=3_000)


def results(pools: dict[int, int], num_steps: int) -> Iterator[Result]:
    gc.collect()
    gc.disable()  # a garbage collection takes milliseconds, and can start in any call
    try:
        for num_blocks, num_rows in pools.items():
            yield from _pool(num_blocks, num_rows, num_steps)
        yield from _first_steps(1, LONG, f"a context of {LONG:,} tokens")
        yield from _first_steps(256, PROMPT_BLOCKS, f"256 contexts of {PROMPT_BLOCKS:,} tokens")
    finally:
        gc.enable()


class Times:
    """Measures the CPU time of calls, and of a busy loop after each call.

    After another process has used the core, the CPU caches contain that process's data. If this
    happens between two short calls (`are_short`), the second call is excluded. Calls that were
    themselves interrupted are always included, because slow calls are more likely to be
    interrupted.
    """

    def __init__(self, are_short: bool = False) -> None:
        self._are_short = are_short
        self.core: list[int] = []
        self.busy: list[int] = []
        self._loops = 0
        self._switches = -1

    def call(self, function: Callable[[], object]) -> None:
        switches = _num_switches()
        core = thread_time_ns()
        function()
        core = thread_time_ns() - core
        busy = self._busy()
        before, self._switches = self._switches, _num_switches()
        if before == switches or not self._are_short:
            self.core.append(core)
            self.busy.append(busy)

    def _busy(self) -> int:
        """Run the busy loop, and return its CPU time.

        The loop's length is adjusted to the first calls.
        """
        if len(self.core) == 8:
            self._loops = sorted(self.core)[4] // 10  # an iteration takes about 10 ns
        core = thread_time_ns()
        for _ in itertools.repeat(None, self._loops):
            pass
        return thread_time_ns() - core

    def results(self, name: str) -> Iterator[Result]:
        core, busy = np.array(self.core) / 1e3, np.array(self.busy[8:]) / 1e3
        for what, q, bar in (
            ("p50", 0.5, None),
            ("p99", 0.99, None),
            ("p99.9", 0.999, MOST_RATIO * float(np.median(core))),
            ("slowest", 1, MOST_US),
        ):
            ours, peer = float(np.quantile(core, q)), float(np.quantile(busy, q))
            yield Result(f"{name}: {what}", "us", ours, peer, "busy loop", bar)


def _num_switches() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


def _manager(num_blocks: int) -> KVCacheManager:
    return KVCacheManager(BLOCK, num_blocks + 1, 2**21, num_preallocate_tokens=0, prefault=True)


def _pool(num_blocks: int, num_rows: int, num_steps: int) -> Iterator[Result]:
    random = np.random.default_rng(0)
    manager = _manager(num_blocks)
    numbers = itertools.count()

    def admit(times: Times, num_admissions: int, num_prompt_blocks: int = PROMPT_BLOCKS) -> None:
        for _ in range(num_admissions):
            tokens = random.integers(0, 152_000, num_prompt_blocks * BLOCK, dtype=np.int32)
            request = Request(str(next(numbers)), tokens)
            times.call(lambda new=request: manager.step(new=[new]))
            manager.free(request)

    # Make enough calls to allocate every block and then evict some blocks.
    first, largest, after_reset, decode = Times(), Times(), Times(), Times(are_short=True)
    admit(first, max(num_blocks // PROMPT_BLOCKS * 11 // 10, num_steps // 10))
    name = f"admission of {PROMPT_BLOCKS:,} blocks, pool of {num_blocks:,}"
    yield from first.results(name)
    admit(largest, max(num_steps // 50, 60), MOST_BLOCKS)
    yield from largest.results(f"admission of {MOST_BLOCKS:,} blocks, pool of {num_blocks:,}")
    start = thread_time_ns()
    assert manager.cache.reset()
    reset = f"reset of the prefix cache, pool of {num_blocks:,}"
    yield Result(reset, "us", (thread_time_ns() - start) / 1e3, bar=MOST_US)
    admit(after_reset, max(num_steps // 10, 100))
    yield from after_reset.results(f"{name}, after the reset")

    # Every few steps, the oldest row ends and a new row starts. The rows have different lengths, so
    # that they need their next blocks in different steps.
    def prompt() -> Request:
        num_tokens = 512 + int(random.integers(BLOCK))
        tokens = random.integers(0, 152_000, num_tokens, dtype=np.int32)
        return Request(str(next(numbers)), tokens)

    prompts = deque(prompt() for _ in range(num_rows))
    manager.step(new=list(prompts))
    ones = np.ones(num_rows, np.int32)
    for step in range(num_steps):
        rows = np.array([manager.row(each) for each in prompts], np.int32)
        sampled = random.integers(0, 152_000, num_rows, dtype=np.int32)
        decode.call(lambda rows=rows, ids=sampled: manager.step(rows, ones, token_ids=ids))
        if step % 4 == 3:
            manager.free(prompts.popleft())
            prompts.append(prompt())
            manager.step(new=[prompts[-1]])
    yield from decode.results(f"decode step of {num_rows} rows, pool of {num_blocks:,}")


def _first_steps(num_rows: int, num_tokens: int, what: str) -> Iterator[Result]:
    """Measure the first decode steps of requests that were admitted together.

    These steps must not copy a context.
    """
    random = np.random.default_rng(0)
    manager = _manager(200_000)
    new = [
        Request(str(i), random.integers(0, 152_000, num_tokens + i % BLOCK, dtype=np.int32))
        for i in range(num_rows)
    ]
    rows, ones = manager.step(new=new).rows, np.ones(num_rows, np.int32)
    times = Times(are_short=True)
    for _ in range(2_000):
        times.call(lambda: manager.step(rows, ones, token_ids=ones))
    yield from times.results(f"first decode steps of {what}")


def main() -> None:
    print(HEADER)
    for result in results(FULL, 100_000):
        print(result.line(), flush=True)


if __name__ == "__main__":
    main()
