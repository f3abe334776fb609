# SPDX-License-Identifier: Apache-2.0
"""Stage: repeated and very large batches on the copy engine, which tests cannot afford."""

from __future__ import annotations

import sys
import time

import numpy as np
import torch

from benchmarks.gpu import say, sizes
from kvcache import ops
from kvcache.worker.pages.page_copy import PageCopy
from kvcache.worker.pages.pages import Pages


def main() -> int:
    parts = {"repeated batches": repeated_batches, "a very large batch": large_batch}
    for name, part in parts.items():
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


if __name__ == "__main__":
    say.ready()
    sys.exit(main())
