"""Device times, measured with events."""

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
    """Return median seconds of the device's work for one call on a stream."""
    return stream_timing(function, stream, rounds).device_s


def stream_timing(
    function: Callable[[], object], stream: torch.cuda.Stream, rounds: int = 5
) -> Timing:
    """Return the same with the submission time; times are never zero in a rehearsal."""
    with torch.cuda.stream(stream):
        timing = device_seconds(function, repeats(rounds))
    return replace(timing, device_s=max(timing.device_s, 1e-9))


def graph_us(calls: Sequence[Callable[[], None]], rounds: int = 20) -> float:
    """Return median microseconds per call of a sequence of calls captured in one graph.

    In a graph, the gaps between launches shrink to the device's minimum. Calls on different memory keep
    data left in the L2 from speeding up the next round: see `num_rotated`.
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
    """Capture the launches in the block on a separate stream while earlier work is in flight.

    `torch.cuda.graph` would first synchronize the device, so that nothing is in flight.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode=mode)
        try:
            yield
        finally:
            graph.capture_end()


def num_rotated(num_bytes: int, most: int = 256) -> int:
    """Return how many input sets of this size are four times the L2, so that none stays cached."""
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    return 2 if REHEARSAL else min(max(-(-4 * l2_bytes // max(num_bytes, 1)), 4), most)
