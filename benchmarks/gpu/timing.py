"""Times on the device, by events."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

from benchmarks.gpu.sizes import REHEARSAL, repeats


def stream_seconds(
    function: Callable[[], object], stream: torch.cuda.Stream, rounds: int = 5
) -> float:
    """Median seconds between events around one call on a stream, after a call to warm up."""
    times = []
    for _ in range(1 + repeats(rounds)):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            start.record(stream)
            function()
            end.record(stream)
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return max(statistics.median(times[1:]), 1e-9)


def graph_us(calls: Sequence[Callable[[], None]], rounds: int = 20) -> float:
    """Median microseconds of one of the calls, all captured in a graph, one after the other.

    In a graph the gaps between launches shrink to the device's. Calls over different memory keep what
    one of them left in the L2 from helping the next round: see `num_rotated`.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(repeats(rounds)):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    return max(statistics.median(times), 1e-6)


def num_rotated(num_bytes: int, most: int = 256) -> int:
    """How many input sets of so many bytes are four times the L2, so that none is found there again."""
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    return 2 if REHEARSAL else min(max(-(-4 * l2_bytes // max(num_bytes, 1)), 4), most)
