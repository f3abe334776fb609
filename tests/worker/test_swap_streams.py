# SPDX-License-Identifier: Apache-2.0
"""Swaps during graph captures, and the streams of an engine."""

import contextlib
import gc
import os
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
import torch

from kvcache import Pages, SwapEngine, ops
from kvcache.worker.pages.page_copy import PageCopy
from kvcache_lab.bandwidth import hold
from tests.machinery.shared import REPO
from tests.machinery.simulated_device import SimulatedStreams


def engine(device="cuda", **options):
    pages = Pages.allocate(65, [[4096, 4096]] * 2, device=device)
    return SwapEngine(pages, pages.on_host(65), **options)


def test_collected_engine_destroys_its_streams():
    streams = SimulatedStreams(0)
    before = len(streams._streams)
    swap = engine("cpu", method="staging", streams=streams)
    made = streams._streams[before:]
    # One bus stream and one relayout stream per direction, and a stream for expedited swap-ins.
    assert len(made) == 5
    del swap
    gc.collect()
    assert [id(stream) for stream in streams.closed] == [id(stream) for stream in made]


def test_pages_outlive_stream_work():
    """Jobs in flight still access the memory after their engine was garbage-collected."""
    streams, alive = SimulatedStreams(0), []
    swap = engine("cpu", method="staging", streams=streams)
    memories = [
        weakref.ref(pages)
        for pages in (swap.device, swap.host, swap._swap_streams["out"].staging._memory)
    ]
    streams.close = lambda streams: alive.extend(ref() is not None for ref in memories)
    del swap
    gc.collect()
    assert alive == [True] * 3
    assert all(ref() is None for ref in memories)


def test_warm_up_requires_a_device():
    with pytest.raises(ValueError, match=r"device is cpu: expected a CUDA device"):
        ops.warm_up("cpu")
    if not torch.version.cuda:
        with pytest.raises(RuntimeError, match=r"there is nothing to load: torch .* without CUDA"):
            ops.warm_up()


def test_warm_up_of_a_missing_device_fails(monkeypatch):
    monkeypatch.setattr(ops.load, "why_no_cuda", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=r"device is cuda:7: expected cuda:0 to cuda:0"):
        ops.warm_up("cuda:7")


@contextlib.contextmanager
def captured_beside(graph):
    """Capture the launches in the block on a separate stream without waiting for earlier work.

    `torch.cuda.graph` would first synchronize the device.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="global")
        try:
            yield
        finally:
            graph.capture_end()


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["kernel", "copy_engine", "staging"])
@pytest.mark.parametrize("elsewhere", [True, False])
def test_polling_does_not_invalidate_a_capture(method, elsewhere):
    """The capture runs in another thread, and then in the polling thread itself.

    The swap must still be under way during the capture. On a busy machine, this may take a longer
    hold.
    """
    if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        pytest.skip("with blocking launches, no swap is under way during a capture")
    for hold_s in (0.2, 1, 5):
        if polls_during_capture(method, elsewhere, hold_s) > 0:
            return
    raise AssertionError("no poll occurred during a swap, so the test is inconclusive")


def polls_during_capture(method, elsewhere, hold_s):
    swap = engine(method=method)
    swap.device.memory.random_(0, 256)
    other = Pages.over(
        [torch.arange(9, dtype=torch.uint8).repeat_interleave(64).view(9, 64).cuda()]
    )
    within, graph, errors = PageCopy(other, other), torch.cuda.CUDAGraph(), []
    num_under_way = 0
    torch.cuda.synchronize()
    held = torch.cuda.Stream()
    with torch.cuda.stream(held):
        hold(hold_s)  # prevents the swap from finishing before the capture begins
        job = swap.swap_out(np.array([[3, 4], [7, 8]]))

    def poll():
        nonlocal num_under_way
        try:
            while not job.poll():
                num_under_way += 1
        except BaseException as error:
            errors.append(error)

    with captured_beside(graph):
        within.copy(np.array([[1, 2]]))
        if elsewhere:
            thread = threading.Thread(target=poll)
            thread.start()
            thread.join()
        else:
            poll()
        within.copy(np.array([[3, 4]]))
    graph.replay()
    torch.cuda.synchronize()
    assert not errors and job.error is None
    assert other.fragment(0)[:, 0].cpu().tolist() == [0, 1, 1, 3, 3, 5, 6, 7, 8]
    for r in range(len(swap.device.sizes)):
        assert torch.equal(swap.host.fragment(r)[[4, 8]], swap.device.fragment(r)[[3, 7]].cpu())
    return num_under_way


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["kernel", "copy_engine", "staging"])
def test_swap_during_capture_is_rejected_without_side_effects(method):
    swap = engine(method=method)
    swap.device.memory.random_(0, 256)
    finished = swap.swap_in(np.array([[6, 9]]))
    finished.wait(timeout_s=60)
    under_way = swap.swap_in(np.array([[1, 10]]))
    other = Pages.over(
        [torch.arange(9, dtype=torch.uint8).repeat_interleave(64).view(9, 64).cuda()]
    )
    within, graph = PageCopy(other, other), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        within.copy(np.array([[1, 2]]))
        for call in (
            lambda: swap.swap_out(np.array([[3, 4]])),
            lambda: swap.swap_in(np.array([[3, 4]])),
            lambda: swap.before_read(finished),
            lambda: swap.before_read(under_way),
            lambda: swap.before_write(np.array([9, 10])),
            swap.order_after_swap_ins,
        ):
            with pytest.raises(
                RuntimeError, match="while the current stream is captured in a CUDA"
            ):
                call()
        within.copy(np.array([[3, 4]]))
    graph.replay()
    torch.cuda.synchronize()
    assert other.fragment(0)[:, 0].cpu().tolist() == [0, 1, 1, 3, 3, 5, 6, 7, 8]
    for page in (3, 7, 8):
        swap.swap_out(np.array([[page, page + 1]])).wait(timeout_s=60)
        for r in range(len(swap.device.sizes)):
            expected = swap.device.fragment(r)[page].cpu()
            assert torch.equal(swap.host.fragment(r)[page + 1], expected)
    swap.wait(timeout_s=60)


@pytest.mark.gpu
def test_swap_engines_use_their_own_high_priority_streams():
    swap = engine(method="staging")
    own = [swap_stream.stream for swap_stream in swap._swap_streams.values()]
    own += [
        s
        for swap_stream in swap._swap_streams.values()
        if swap_stream.staging is not None
        for s in (swap_stream.staging.first, swap_stream.staging.last)
    ]
    handles = {stream.cuda_stream for stream in own}
    assert len(handles) == 5
    pool = [torch.cuda.Stream(priority=priority) for priority in (0, -1) for _ in range(40)]
    assert not handles & {stream.cuda_stream for stream in pool}
    highest = min(torch.cuda.Stream.priority_range())  # the highest priority in torch's stream pool
    assert highest < 0 and all(stream.priority <= highest for stream in own)


@pytest.mark.gpu
def test_engine_may_be_collected_with_swaps_in_flight():
    for _ in range(5):
        pages = Pages.allocate(65, [[4096, 4096]] * 2, device="cuda")
        pages.memory.random_(0, 256)
        host = pages.on_host(65)
        swap = SwapEngine(pages, host, method="staging", staging_bytes=1)
        swap.swap_out(np.stack([np.arange(1, 65)] * 2, 1))
        del swap
        gc.collect()
        assert torch.equal(host.fragment(1)[1:], pages.fragment(1)[1:].cpu())


FIRST_LAUNCH_IN_A_CAPTURE = """
import numpy as np, torch
from kvcache import Pages, ops
from kvcache.worker.pages.page_copy import PageCopy
pages = Pages.over([torch.zeros(9, 512, dtype=torch.uint8, device="cuda")])
torch.cuda.synchronize()
ops.warm_up()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    PageCopy(pages, pages).copy(np.array([[1, 2]]))
pages.memory[1] = 7
graph.replay()
torch.cuda.synchronize()
assert pages.memory[2].unique().tolist() == [7]
print("captured")
"""


@pytest.mark.gpu
def test_warm_up_allows_capturing_the_first_launch():
    program = FIRST_LAUNCH_IN_A_CAPTURE
    # The runtime without a GPU rejects loading kernels during a capture, like drivers before 12.3.
    environment = {**os.environ, "KVCACHE_GPULESS_LOADING": "lazy"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPO, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout == "captured\n", done.stderr


@pytest.mark.gpu
def test_warm_up_loads_every_kernel_once():
    num_kernels = torch.ops.kvcache._load_kernels(0)
    assert num_kernels > 30
    ops.warm_up()
    ops.warm_up("cuda:0")
    assert torch.ops.kvcache._load_kernels(0) == num_kernels


@pytest.mark.gpu
def test_checked_mode_cannot_be_captured(monkeypatch):
    pages = Pages.over([torch.zeros(9, 512, dtype=torch.uint8, device="cuda")])
    pairs = torch.tensor([[1, 2]], device="cuda", dtype=torch.int32)
    within, graph = PageCopy(pages, pages), torch.cuda.CUDAGraph()
    ops.warm_up()
    torch.cuda.synchronize()
    monkeypatch.setenv("KVCACHE_CHECKED", "1")
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match=r"synchronizes, but this stream is being captured"):
            within.copy(pairs)
        monkeypatch.delenv("KVCACHE_CHECKED")
        within.copy(pairs)  # the capture remains valid
    pages.memory[1] = 7
    graph.replay()
    torch.cuda.synchronize()
    assert pages.memory[2].unique().tolist() == [7]
