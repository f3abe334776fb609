# SPDX-License-Identifier: Apache-2.0
"""Measures puts and gets of blocks, with the storage engines alone and through a `StoreTier`.

    python -m benchmarks.store                  # every engine that is installed
    python -m benchmarks.store --only disk --folder /mnt/nvme/x --json benchmarks/results/cpu.json

"raw" passes all blocks to the storage engine in one call, using memory registered with that engine.
"tier" is the latency seen by an inference engine. A put lasts from the end of the step that filled
the blocks until the last block is stored. A get lasts from a request's `match` until the request's
blocks are cached in pages and their digests have been compared. Both move the same number of blocks
in alternating rounds, and the pages are compared. CPU time covers all threads. On a busy machine,
it is more meaningful than elapsed time. Mooncake's master and memory are on the same machine. The
disk store reads from the page cache if its file fits there.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from benchmarks.measure import add_json, save
from kvcache import Admit, External, KVCacheManager, Pages, Request, StepReport
from kvcache_exchange.store import BlockStore, DiskStore, MooncakeStore, StoreTier
from kvcache_exchange.store.value_format import BlockKey, key_text
from tests.machinery import mooncake_master

SHAPES = ((4096, 16 << 10), (256, 64 << 10), (64, 1 << 20))  # number of blocks, bytes per block
ROUNDS = 9
BLOCK_SIZE = 16
WAYS = ("raw put", "tier put", "raw get", "tier get")


def measure(store: BlockStore, num_blocks: int, block_bytes: int) -> dict:
    """Return median and best GB/s of each method, and microseconds per block (elapsed and CPU time)."""
    pages = Pages.allocate(num_blocks + 2, [[block_bytes // 8] * 2] * 4)
    manager = KVCacheManager(
        BLOCK_SIZE, num_blocks + 2, 2**20, num_preallocate_tokens=0, enable_events=True
    )
    tier = StoreTier(
        manager, pages, store, model="benchmark", contents="random bytes", timeout_s=60.0,
        staging_bytes=2 * num_blocks * (block_bytes + 192), announce=False,
    )  # fmt: skip
    rng = np.random.default_rng(1)
    wait_for_open(tier)
    rank = tier._ranks[0]
    values = rank._staging.of([*range(1, num_blocks + 1)])
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    cpu: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(ROUNDS + 2):
        keys = [f"raw {number} {i} {time.time_ns()}" for i in range(num_blocks)]
        tokens = rng.integers(0, 1 << 30, num_blocks * BLOCK_SIZE + 1).astype(np.int32)
        took = {
            "raw put": timed(lambda k=tuple(keys): check(all(store.put([*k], values)), "raw put")),
            "tier put": put(manager, pages, tier, tokens, rng),
            "raw get": timed(
                lambda k=tuple(keys): check(min(store.get([*k], values)) > 0, "raw get")
            ),
            "tier get": get(manager, pages, tier, tokens),
        }
        hashes = manager.cache.hashes(Request("hashes", tokens))
        keys += [key_text(rank._fingerprint, BlockKey(0, each.tobytes())) for each in hashes]
        store.remove(keys)  # ensures that both methods reuse the same memory
        if number >= 2:
            for way, (elapsed, used) in took.items():
                seconds[way].append(elapsed)
                cpu[way].append(used)
    stats = tier.stats
    wrong = stats.errors + stats.timeouts + stats.corrupt_blocks + stats.refused_blocks
    check(wrong == 0, str(stats))
    tier.close()
    total = num_blocks * block_bytes
    return {
        "blocks": num_blocks,
        "block_bytes": block_bytes,
        "GB_per_s": {way: total / np.median(seconds[way]) / 1e9 for way in WAYS},
        "best_GB_per_s": {way: total / min(seconds[way]) / 1e9 for way in WAYS},
        "us_per_block": {way: np.median(seconds[way]) / num_blocks * 1e6 for way in WAYS},
        "cpu_us_per_block": {way: np.median(cpu[way]) / num_blocks * 1e6 for way in WAYS},
    }


def put(
    manager: KVCacheManager,
    pages: Pages,
    tier: StoreTier,
    tokens: np.ndarray,
    rng: np.random.Generator,
) -> tuple[float, float]:
    """Return the elapsed and CPU seconds until the blocks of a step are stored."""
    manager.cache.reset()
    request = Request("put", tokens)
    plan = manager.step(new=[request])
    blocks = manager.block_ids(request)
    for region in range(len(pages.sizes)):
        fragment = pages.fragment(region).numpy()
        fragment[blocks] = rng.integers(0, 256, fragment[blocks].shape, np.uint8)
    report = StepReport(plan.step_id, completed=True)
    manager.report(report)
    manager.free(request)
    clock = Clock()
    tier.save(report)
    while tier.num_waiting_blocks:
        time.sleep(20e-6)
        tier.poll()
        tier.save(report)
    took = clock.passed()
    put.expected = [pages.fragment(r).numpy()[blocks[:-1]] for r in range(len(pages.sizes))]
    return took


def get(
    manager: KVCacheManager, pages: Pages, tier: StoreTier, tokens: np.ndarray
) -> tuple[float, float]:
    """Return elapsed and CPU seconds until all blocks of a prompt have arrived."""
    manager.cache.reset()
    pages.memory.zero_()
    request = Request("get", tokens)
    clock = Clock()
    while (num_tokens := tier.match(request)) is None:
        time.sleep(20e-6)
    check(num_tokens == len(tokens) - 1, f"{num_tokens} tokens were found")
    plan = manager.step(new=[Admit(request, external=External(num_tokens, delayed=True))])
    tier.begin(request)
    while not (received := tier.poll()):
        time.sleep(20e-6)
    took = clock.passed()
    check(received[0].num_loaded_tokens == num_tokens, str(tier.stats))
    blocks = manager.block_ids(request)
    for region, expected in enumerate(put.expected):
        check(np.array_equal(pages.fragment(region).numpy()[blocks], expected), "other bytes came")
    report = StepReport(plan.step_id, completed=True)
    manager.report(report)
    manager.free(request)
    while tier.num_waiting_blocks:  # until the blocks are stored
        time.sleep(20e-6)
        tier.save(report)
        tier.poll()
    return took


def wait_for_open(tier: StoreTier) -> None:
    request, deadline = Request("none", range(BLOCK_SIZE + 1)), time.monotonic() + 20
    while tier.match(request) is None:
        check(time.monotonic() < deadline, "the store cannot be opened")
        time.sleep(0.01)
    tier.cancel(request)


class Clock:
    """Measures the elapsed seconds and the CPU seconds of all threads since construction."""

    def __init__(self) -> None:
        self._begun = time.perf_counter(), time.process_time()

    def passed(self) -> tuple[float, float]:
        now = time.perf_counter(), time.process_time()
        return now[0] - self._begun[0], now[1] - self._begun[1]


def timed(work: Callable[[], None]) -> tuple[float, float]:
    clock = Clock()
    work()
    return clock.passed()


def check(holds: bool, text: str) -> None:
    if not holds:
        raise AssertionError(text)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store")
    parser.add_argument("--only", choices=("disk", "mooncake"))
    parser.add_argument("--folder", type=Path, help="folder of the disk store; default: temporary")
    add_json(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    installed = ["disk"] if importlib.util.find_spec("nixl") else []
    installed += ["mooncake"] if mooncake_master.is_installed() else []
    results = []
    print(f"{'GB/s, median (CPU us a block)':31}" + "".join(f"{way:>16}" for way in WAYS))
    with ExitStack() as stack:
        for name in [args.only] if args.only else installed:
            for num_blocks, block_bytes in SHAPES:
                if name == "disk":
                    folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
                    store: BlockStore = DiskStore(folder, "1GiB")
                else:
                    master = stack.enter_context(mooncake_master.Master())
                    store = MooncakeStore(master.address, segment_bytes="1GiB")
                row = {"engine": name, **measure(store, num_blocks, block_bytes)}
                results.append(row)
                cells = "".join(
                    f"{row['GB_per_s'][way]:>7.2f} ({row['cpu_us_per_block'][way]:6.1f})"
                    for way in WAYS
                )
                print(
                    f"{name:9}{num_blocks:>6} x {block_bytes >> 10:>4} KiB      {cells}", flush=True
                )
    save(args.json, "store", {"results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
