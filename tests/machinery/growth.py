# SPDX-License-Identifier: Apache-2.0
"""Checks that memory use stays flat in long runs.

    python -m tests.machinery.growth [--scale F] [--seed N]

During the warm-up, tables, indices and the event queue reach their final size. After the warm-up,
resident memory may grow by at most `MOST_GROWTH`, by twice that with many live requests, and by
four times that with a large pool, whose allocations are large. Events are never drained.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np

from kvcache import KVCacheManager, Request, StepReport
from kvcache.allocator import check_invariants

MOST_GROWTH = 16 << 20  # bytes
WARM_UP = 0.5  # fraction of a run


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def coming_and_going(num_steps: int, seed: int) -> Iterator[None]:
    """Run steps with about 8 requests at a time.

    Each step admits one request and frees one. Half of the prompts share a prefix with others.
    """
    rng = random.Random(seed)
    manager = KVCacheManager(4, 1000, 256, enable_events=True)
    running: dict[int, Request] = {}
    for step in range(num_steps):
        first = rng.randrange(50) if rng.random() < 0.5 else 50 + rng.randrange(10**6)
        new = Request(f"r{step}", np.arange(first, first + rng.randint(8, 64)))
        rows = [*running]
        plan = manager.step(rows, [1] * len(rows), token_ids=[step % 1000] * len(rows), new=[new])
        if plan.rows[-1] >= 0:
            running[int(plan.rows[-1])] = new
        manager.report(StepReport(plan.step_id, True))
        if len(running) > 8:
            manager.free(running.pop(rng.choice([*running])))
        yield
    check_invariants(manager)


def many_alive(num_requests: int, seed: int) -> Iterator[None]:
    """Repeatedly run `num_requests` requests at once, compute a token for each, and free them all."""
    rng = random.Random(seed)
    manager = KVCacheManager(4, 4 * num_requests, 64, num_preallocate_tokens=0)
    for _ in range(10):
        tokens = [rng.randrange(10**6) for _ in range(num_requests)]
        requests = [Request(f"r{i}", range(t, t + 6)) for i, t in enumerate(tokens)]
        rows = manager.step(new=requests).rows
        plan = manager.step(rows, [1] * num_requests, token_ids=[7] * num_requests)
        assert (plan.rows >= 0).all()
        manager.report(StepReport(plan.step_id, True))
        manager.free(*requests)
        yield
    check_invariants(manager)


def large_pool(num_blocks: int, seed: int) -> Iterator[None]:
    """Fill a pool with cached blocks four times."""
    part = max(num_blocks // 40, 1)
    manager = KVCacheManager(1, num_blocks, part, num_preallocate_tokens=0, enable_events=True)
    for i in range(160):  # each request fills a fortieth of the pool
        request = Request("r", (np.arange(part) + (seed + i) % 1000 * part) % 2**31)
        assert manager.step(new=[request]).rows[0] >= 0
        manager.free(request)
        yield
    assert manager.pool.num_cached == num_blocks - 1


def measure(name: str, operations: int, run: Callable[[], Iterator[None]], most: int) -> bool:
    """Run the operations, and print their rate and the memory use. Return whether memory use stayed
    flat.
    """
    started, start = time.perf_counter(), resident_bytes()
    samples = [resident_bytes() for _ in run()] if operations < 10**4 else _sampled(run, operations)
    took, end = time.perf_counter() - started, resident_bytes()
    warm = samples[int(len(samples) * WARM_UP)]
    highest = max(samples[int(len(samples) * WARM_UP) :])
    is_flat = highest - warm <= most
    sizes = ", ".join(f"{each / 2**20:.1f}" for each in (start, warm, samples[-1], end))
    print(
        f"{name}: {operations / took:.0f} operations per second; resident MiB at the start, after the "
        f"warm-up, at the end, without it: {sizes}",
        "" if is_flat else f"GREW by {(highest - warm) / 2**20:.1f}",
        flush=True,
    )
    return is_flat


def _sampled(run: Callable[[], Iterator[None]], operations: int) -> list[int]:
    every = operations // 1000
    return [resident_bytes() for i, _ in enumerate(run()) if i % every == 0]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="of all sizes")
    parser.add_argument(
        "--seed", type=int, default=None, help="default: drawn at random and printed"
    )
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    steps, alive, blocks = (int(n * options.scale) for n in (10**6, 10**5, 5 * 10**7))
    is_flat = measure(f"{steps} steps", steps, lambda: coming_and_going(steps, seed), MOST_GROWTH)
    is_flat &= measure(f"{alive} alive", 10, lambda: many_alive(alive, seed), 2 * MOST_GROWTH)
    is_flat &= measure(f"{blocks} blocks", 160, lambda: large_pool(blocks, seed), 4 * MOST_GROWTH)
    return 0 if is_flat else 1


if __name__ == "__main__":
    sys.exit(main())
