"""Times on the device, by events."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from benchmarks.gpu.sizes import REHEARSAL, repeats
from kvcache.worker.swap.bandwidth import Timing, device_seconds


def stream_seconds(
    function: Callable[[], object], stream: torch.cuda.Stream, rounds: int = 5
) -> float:
    """Median seconds of the device's work of one call on a stream."""
    return stream_timing(function, stream, rounds).device_s


def stream_timing(
    function: Callable[[], object], stream: torch.cuda.Stream, rounds: int = 5
) -> Timing:
    """The same, with what the submission took; in a rehearsal no time is zero."""
    with torch.cuda.stream(stream):
        timing = device_seconds(function, repeats(rounds))
    return replace(timing, device_s=max(timing.device_s, 1e-9))


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


@contextmanager
def captured_beside(graph: torch.cuda.CUDAGraph, mode: str = "global") -> Iterator[None]:
    """Captures what is launched within, on a stream of its own, while earlier work is under way.

    `torch.cuda.graph` synchronises the device first, so that nothing is.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode=mode)
        try:
            yield
        finally:
            graph.capture_end()


def num_rotated(num_bytes: int, most: int = 256) -> int:
    """How many input sets of so many bytes are four times the L2, so that none is found there again."""
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    return 2 if REHEARSAL else min(max(-(-4 * l2_bytes // max(num_bytes, 1)), 4), most)
