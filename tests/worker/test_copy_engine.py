# SPDX-License-Identifier: Apache-2.0
"""The copy engine on a device: in captured graphs, without batched copies, and with a rejected copy."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from kvcache import Pages, ops
from kvcache.worker.pages.page_copy import PageCopy
from tests.machinery.shared import REPO

pytestmark = pytest.mark.gpu


def sides(num_host_pages=65):
    pages = Pages.allocate(65, [[4096, 4096]] * 2, device="cuda")
    pages.memory.random_(0, 256)
    return pages, pages.on_host(num_host_pages)


PAIRS = np.array([[1, 5], [9, 2], [20, 30]])


def arrived(pages, host, pairs=PAIRS):
    return all(
        torch.equal(host.fragment(r)[pairs[:, 1]], pages.fragment(r)[pairs[:, 0]].cpu())
        for r in range(len(pages.sizes))
    )


@pytest.mark.parametrize("engine", [ops.COPY_ENGINE, ops.COPY_ENGINE_SINGLY])
def test_copies_of_the_copy_engine_can_be_captured(engine):
    pages, host = sides()
    page_copy, graph, stream = PageCopy(pages, host), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        page_copy.copy(PAIRS, engine=engine)
    pages.memory.random_(0, 256)
    torch.cuda.synchronize()
    assert not arrived(pages, host)
    graph.replay()
    torch.cuda.synchronize()
    assert arrived(pages, host)
    pages.memory.random_(0, 256)
    graph.replay()
    torch.cuda.synchronize()
    assert arrived(pages, host)


@pytest.mark.parametrize("how", ["by the engine", "by the environment"])
def test_disabling_batches_copies_the_same_bytes(monkeypatch, how):
    pages, host = sides()
    engine = ops.COPY_ENGINE
    if how == "by the engine":
        engine = ops.COPY_ENGINE_SINGLY
    else:
        monkeypatch.setenv("KVCACHE_BATCH_COPIES", "0")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        PageCopy(pages, host).copy(PAIRS, engine=engine)
    stream.synchronize()
    assert arrived(pages, host)


COPIES_IN_A_STREAM = """
import numpy as np, torch
from kvcache import Pages, SwapEngine
pages = Pages.allocate(65, [[4096, 4096]] * 2, device="cuda")
pages.memory.random_(0, 256)
swap = SwapEngine(pages, pages.on_host(65), method="copy_engine")
swap.swap_out(np.array([[1, 5], [9, 2], [20, 30]])).wait(timeout_s=60)
for r in range(4):
    assert torch.equal(swap.host.fragment(r)[[5, 2, 30]], pages.fragment(r)[[1, 9, 20]].cpu())
print("arrived")
"""


@pytest.mark.parametrize("is_batched", [False, True])
def test_disabled_batches_are_not_used(is_batched):
    """The runtime without a GPU makes every batch fail. On a GPU, both variants succeed."""
    environment = {**os.environ, "KVCACHE_GPULESS_BATCHES": "crash"}
    environment["KVCACHE_BATCH_COPIES"] = str(int(is_batched))
    done = subprocess.run(
        [sys.executable, "-c", COPIES_IN_A_STREAM],
        cwd=REPO, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    if is_batched and "KVCACHE_GPULESS_RUNTIME" in os.environ:
        assert done.returncode == 1 and "a batch of 12 copies failed: unknown error" in done.stderr
    else:
        assert done.returncode == 0 and done.stdout == "arrived\n", done.stderr


ACROSS_TWO_PIECES = """
import numpy as np, torch
from kvcache import Pages, ops
from kvcache.worker.pages import pinning
from kvcache.worker.pages.page_copy import PageCopy
pinning._CHUNK_BYTES = 1 << 20
pages = Pages.allocate(300, [[16384]], device="cuda")
pages.memory.random_(0, 256)
host = pages.on_host(300)
border = host.pages_per_chunk
assert 0 < border < 299
host.pages_per_chunk = 0  # as if the memory had been pinned in one piece
pairs = np.array([[1, 2], [5, border - 1], [6, border], [9, 7]])
stream, refused = torch.cuda.Stream(), False
stream.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(stream):
    try:
        PageCopy(pages, host).copy(pairs, engine=ops.COPY_ENGINE)
    except RuntimeError as error:
        print(error)
        pairs, refused = pairs[[0, 3]], True
        PageCopy(pages, host).copy(pairs, engine=ops.COPY_ENGINE)  # the failed call left no copies behind
stream.synchronize()
assert torch.equal(host.fragment(0)[pairs[:, 1]], pages.fragment(0)[pairs[:, 0]].cpu())
print("refused" if refused else "arrived")
"""


@pytest.mark.parametrize("driver", ["apart", "joined"])
def test_copy_across_pinned_pieces_succeeds_or_raises(driver, record_property):
    """CUDA's documentation does not specify whether a copy may span two adjacent registered ranges.

    The runtime without a GPU covers both outcomes.
    """
    done = subprocess.run(
        [sys.executable, "-c", ACROSS_TWO_PIECES],
        cwd=REPO, env={**os.environ, "KVCACHE_GPULESS_NEIGHBOURS": driver},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *message, outcome = done.stdout.splitlines()
    record_property("a copy over two pinned pieces", outcome)
    named = (
        r"copy 1 \(32768 bytes from 0x\w+ to 0x\w+\) failed: invalid argument; expected each side"
    )
    assert outcome == "arrived" or re.match(named, message[0])
    if "KVCACHE_GPULESS_RUNTIME" in os.environ:
        assert outcome == ("arrived" if driver == "joined" else "refused")


@pytest.mark.parametrize("into_host", [True, False])
def test_kernel_requires_all_tensors_pinned(into_host):
    pages = Pages.allocate(9, [[512]] * 2, device="cuda")
    pageable = torch.zeros(9, 512, dtype=torch.uint8)
    pinned = pageable.pin_memory()
    host = Pages.over([pinned, pageable])
    page_copy = PageCopy(pages, host) if into_host else PageCopy(host, pages)
    with pytest.raises(RuntimeError, match=r"'s regions\[1\] is host memory that is not pinned"):
        page_copy.copy(np.array([[1, 2]]))
    page_copy.copy(np.array([[1, 2]]), engine=ops.COPY_ENGINE)
    torch.cuda.synchronize()
