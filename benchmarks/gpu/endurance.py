# SPDX-License-Identifier: Apache-2.0
"""Stage: tests for failures that appear only after some time or during other work.

Runs repeated and very large batches on the copy engine, captured ops that are replayed with
different data, and jobs that are polled while another thread captures.
"""

from __future__ import annotations

import sys
import threading
import time

import numpy as np
import torch

from benchmarks.gpu import say, sizes
from benchmarks.gpu.timing import captured_beside
from kvcache import ops
from kvcache.worker.pages.page_copy import PageCopy
from kvcache.worker.pages.pages import Pages
from kvcache.worker.swap.engine import SwapEngine
from kvcache.worker.swap.job import SwapJob
from kvcache_lab.bandwidth import hold

_HELD_S = 0.05  # longer than it takes to start a capture of 20 copies


def main() -> int:
    for name, part in (
        ("repeated batches", repeated_batches),
        ("a very large batch", large_batch),
        ("capture and replay", capture_and_replay),
        ("polling during a capture", poll_during_capture),
    ):
        if say.seconds_left() < 3:
            say.failed(f"{name}: not run, no time left")
            continue
        with say.attempt(name):
            start = time.monotonic()
            say.learned(part())
            say.row(part=name, seconds=time.monotonic() - start)
    return say.exit_code()


def memories(fragment: int, num_blocks: int) -> tuple[Pages, Pages]:
    """Create pages with random contents on the device, and the same number of pages on the host."""
    pages = Pages.allocate(num_blocks, [[fragment]], device="cuda")
    pages.memory.random_(0, 256)
    return pages, pages.on_host(num_blocks)


def round_trip(pages: Pages, host: Pages, stream: torch.cuda.Stream, count: int) -> None:
    """Copy pages out in batches, clear them, and copy them back.

    Raises AssertionError unless every page is restored.
    """
    before = pages.fragment(0).clone()
    # Use only even pages, because adjacent pages would be merged.
    ids = np.random.default_rng(count).permutation(pages.num_blocks // 2)[:count] * 2 + 1
    pairs = np.stack([ids, ids], 1)
    out, back = PageCopy(pages, host), PageCopy(host, pages)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out.copy(pairs, engine=ops.COPY_ENGINE)
        pages.zero(ids.astype(np.int32))
        back.copy(pairs, engine=ops.COPY_ENGINE)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    assert torch.equal(pages.fragment(0), before), f"a batch of {count:,} pieces changed pages"


def repeated_batches() -> str:
    """Run batches of up to 4,096 pieces for several seconds, and verify every batch."""
    most = sizes.scaled(4096, 64)
    pages, host = memories(4096, 2 * most + 2)
    stream = torch.cuda.Stream()
    rounds, deadline = 0, time.monotonic() + min(6, say.seconds_left() / 3)
    while time.monotonic() < deadline and rounds < sizes.repeats(2000):
        round_trip(pages, host, stream, most >> rounds % 5)
        rounds += 1
    return f"{rounds} round trips in batches of {most >> 4:,} to {most:,} pieces were correct"


def large_batch() -> str:
    """Run a single call with more pieces than any realistic swap."""
    count = sizes.scaled(200_000, 200)
    pages, host = memories(1024, 2 * count + 2)
    round_trip(pages, host, torch.cuda.Stream(), count)
    return f"one call with {count:,} pieces was correct"


def capture_and_replay() -> str:
    """Replay a graph of a page copy and a token write with different ids and slots."""
    pages, host = memories(4096, 65)
    other = Pages.allocate(65, [[4096]], device="cuda")
    ids = torch.zeros(8, 2, dtype=torch.int32, device="cuda")
    slots = torch.full((32,), -1, device="cuda")
    tokens = torch.randn(2, 32, 8, 128, device="cuda").bfloat16()
    caches = torch.zeros(2, 16, 16, 8, 128, device="cuda", dtype=torch.bfloat16)
    within, leaving = PageCopy(pages, other), PageCopy(pages, host)
    fixed = np.array([[3, 5], [9, 2]], np.int32)

    def work() -> None:
        within.copy(ids)
        leaving.copy(fixed)  # copied by a kernel; ids on the CPU would be recorded in the graph
        ops.write_kv(tokens[0], tokens[1], caches[0], caches[1], slots)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        work()
    replays = sizes.repeats(50)
    for seed in range(replays):
        drawn = torch.randperm(64, generator=torch.Generator().manual_seed(seed)) + 1
        # Exclude slots of the null block, because writes to it are dropped.
        targets = torch.randperm(240, generator=torch.Generator().manual_seed(seed))[:32] + 16
        ids.copy_(drawn[:16].view(8, 2).int())
        slots.copy_(targets)
        pages.memory.random_(0, 256)
        caches.zero_()
        graph.replay()
        torch.cuda.synchronize()
        chosen = ids.long().cpu()
        assert torch.equal(
            other.fragment(0).cpu()[chosen[:, 1]], pages.fragment(0).cpu()[chosen[:, 0]]
        ), f"replay {seed}: pages"
        assert torch.equal(host.fragment(0)[[5, 2]], pages.fragment(0).cpu()[[3, 9]]), (
            f"replay {seed}: pages on the host"
        )
        written = caches.cpu().view(2, 256, 8, 128)[:, targets]
        assert torch.equal(written, tokens.cpu()), f"replay {seed}: tokens"
    return f"{replays} replays of a captured graph were correct"


class Poller(threading.Thread):
    """Polls the newest job until stopped, and counts the results while `capturing` is set."""

    def __init__(self, jobs: list[SwapJob]) -> None:
        super().__init__(daemon=True)
        self._jobs, self._stopped = jobs, threading.Event()
        self.capturing = False
        self.num_polls = self.num_under_way = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._stopped.is_set():
                job, before = self._jobs[-1], self.capturing
                is_under_way = not job.poll()
                assert job.error is None, job.error
                self.num_polls += 1
                self.num_under_way += before and is_under_way and self.capturing
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        """Stop the thread. Raises its error, if any."""
        self._stopped.set()
        self.join(10)
        if self.error is not None:
            raise self.error


def poll_during_capture() -> str:
    """Poll an unfinished swap from one thread while another thread captures in the strictest mode."""
    num_blocks = sizes.pool_bytes(64 << 20, 4 << 20) // (16 << 10)
    pages, host = memories(16 << 10, num_blocks)
    engine = SwapEngine(pages, host)
    ids = np.arange(1, num_blocks)
    pairs = np.stack([ids, ids], 1)
    # A chain of copies from page 1 to page 21.
    chain, _ = memories(4096, 22)
    within = PageCopy(chain, chain)
    links = [np.array([[page, page + 1]], np.int32) for page in range(1, 21)]
    within.copy(links[0])
    torch.cuda.synchronize()
    held, jobs = torch.cuda.Stream(), [engine.swap_out(pairs)]
    poller, captures = Poller(jobs), sizes.repeats(20)
    poller.start()
    try:
        for number in range(captures):
            graph, met = torch.cuda.CUDAGraph(), poller.num_under_way
            with torch.cuda.stream(held):
                hold(_HELD_S)
                jobs.append(engine.swap_out(pairs))
            with captured_beside(graph):
                poller.capturing = True
                for link in links:
                    within.copy(link)
                    time.sleep(0.0005)
                poller.capturing = False
            assert poller.num_under_way > met, (
                f"capture {number}: no poll occurred during a swap, so the test is inconclusive"
            )
            chain.memory.random_(0, 256)
            graph.replay()
            torch.cuda.synchronize()
            fragments = chain.fragment(0)
            assert torch.equal(fragments[21], fragments[1]), (
                "wrong result of a captured chain of copies"
            )
    finally:
        poller.stop()
    engine.wait(20)
    return (
        f"{captures} captures held beside {poller.num_polls:,} polls, {poller.num_under_way:,} of them "
        "of a swap under way"
    )


if __name__ == "__main__":
    say.ready()
    sys.exit(main())
