# SPDX-License-Identifier: Apache-2.0
"""Counts the CUDA runtime calls that each path makes: launches, copies, queries and waits.

A performance regression is visible as a changed count.

The expected counts are exact, so any increase or decrease is detected. Counting requires the CUDA
runtime without a GPU.
"""

import numpy as np
import pytest
import torch

from kvcache import BlockTables, Pages, SwapEngine, TableShape, ops
from kvcache.worker.pages.page_copy import PageCopy
from tests.machinery.gpu_less import counts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not counts.is_available(), reason="only the runtime without a GPU counts calls"
    ),
]
PAIRS = np.stack([np.arange(1, 61, 2), np.arange(2, 62, 2)], 1)  # 30 pages, no two of them adjacent
REGIONS = 4


def cost(call):
    """Make the call twice on a side stream, and return the nonzero counts of the second call."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
        torch.cuda.synchronize()
        with counts.counted() as found:
            call()
    torch.cuda.synchronize()
    return {name: number for name, number in found.items() if number}


def pools():
    pages = Pages.allocate(65, [[4096, 4096]] * 2, device="cuda")
    return pages, pages.on_host(65)


@pytest.mark.parametrize("direction", ["out", "in"])
@pytest.mark.parametrize(("method", "expected"), [
    # The first call has already queried the location of the host memory and of each region.
    ("kernel", {"launches": 1, "capture_queries": 4}),
    ("copy_engine",
     {"batches": 1, "batched_copies": REGIONS * len(PAIRS), "capture_queries": 5, "device_queries": 1}),
    (
        "staging",
        {
            "launches": 1,
            "batches": 1,
            "batched_copies": len(PAIRS),
            "capture_queries": 8,
            "device_queries": 1,
        },
    ),
])  # fmt: skip
def test_a_swap_makes_the_expected_calls(method, direction, expected):
    pages, host = pools()
    swap = SwapEngine(pages, host, method=method)
    start = swap.swap_out if direction == "out" else swap.swap_in
    # The call makes no individual copies, no copies of pageable memory, no use of the legacy
    # stream, and no host wait. One job is in flight, and the call queries whether it has finished.
    assert cost(lambda: start(PAIRS)) == {**expected, "event_queries": 1}


def test_polling_a_swap_makes_the_expected_calls():
    swap = SwapEngine(*pools(), method="kernel")
    job = swap.swap_out(PAIRS)
    job.wait(timeout_s=60)
    assert cost(job.poll) == {"event_queries": 1}
    job = swap.swap_out(PAIRS)
    torch.cuda.synchronize()
    with counts.counted() as found:
        assert job.poll()
    assert {name: n for name, n in found.items() if n} == {"event_queries": 1}


def test_a_page_copy_on_the_device_makes_the_expected_calls():
    pages, _ = pools()
    page_copy = PageCopy(pages, pages)
    there = torch.from_numpy(PAIRS.astype(np.int32)).cuda()
    assert cost(lambda: page_copy.copy(there)) == {"launches": 1}
    assert cost(lambda: page_copy.copy(PAIRS)) == {"launches": 1}


@pytest.mark.parametrize("singly", [False, True])
def test_a_page_copy_by_the_copy_engine_makes_the_expected_calls(singly):
    pages, host = pools()
    page_copy = PageCopy(pages, host)
    engine = ops.COPY_ENGINE_SINGLY if singly else ops.COPY_ENGINE
    pieces = REGIONS * len(PAIRS)
    expected = {"copies": pieces} if singly else {"batches": 1, "batched_copies": pieces}
    expected |= (
        {} if singly else {"capture_queries": 1, "device_queries": 1}
    )  # the first call queries whether batched copies are available
    assert cost(lambda: page_copy.copy(PAIRS, engine=engine)) == expected


def test_clearing_pages_makes_the_expected_calls():
    pages, _ = pools()
    ids = PAIRS[:, 0].astype(np.int32)
    assert cost(lambda: pages.zero(ids)) == {"launches": 1}


def tables():
    made = BlockTables(
        [TableShape(16, 64)] * 2, max_num_reqs=64, max_num_tokens=1024, device="cuda"
    )
    for row in range(64):
        made.add_row([[1, 2, 3], [4, 5, 6]], row)
    made.commit_updates()
    return made


def test_committing_changed_tables_makes_the_expected_calls():
    made = tables()

    def step():
        made.append_row([[7], [8]], 3)
        made.commit_updates()

    assert cost(step) == {"copies": 1, "launches": 1, "event_queries": 1, "capture_queries": 4}


def test_a_slot_mapping_makes_the_expected_calls():
    made = tables()
    rows = torch.arange(32, dtype=torch.int32, device="cuda")
    positions = torch.full((32,), 5, device="cuda")
    mapped = cost(lambda: made.compute_slot_mapping(rows, positions))
    assert mapped == {"launches": 1, "capture_queries": 1}


def test_work_on_the_default_stream_is_counted():
    pages, _ = pools()
    with torch.cuda.stream(torch.cuda.default_stream()), counts.counted() as found:
        pages.zero(PAIRS[:, 0].astype(np.int32))
    assert found["legacy_work"] == 1
