# SPDX-License-Identifier: Apache-2.0
"""Measures device times with events."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from benchmarks.gpu.sizes import REHEARSAL, repeats
from kvcache_lab.bandwidth import Timing, device_seconds


def stream_seconds(
    function: Callable[[], object], stream: torch.cuda.Stream, rounds: int = 5
) -> float:
    """Return the median device time of a call on a stream, in seconds."""
    return stream_timing(function, stream, rounds).device_s


def stream_timing(
    function: Callable[[], object], stream: torch.cuda.Stream, rounds: int = 5
) -> Timing:
    """Return the device time (at least 1 ns) and the submission time."""
    with torch.cuda.stream(stream):
        timing = device_seconds(function, repeats(rounds))
    return replace(timing, device_s=max(timing.device_s, 1e-9))


def graph_us(calls: Sequence[Callable[[], None]], rounds: int = 20) -> float:
    """Return the median time per call of calls captured in one graph, in microseconds.

    In a graph, the gaps between launches are minimal. If the calls use enough different memory (see
    `num_rotated`), data that a round leaves in the L2 cache does not speed up the next round.
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
    """Return how many input sets of this size fill four times the L2 cache, so that none stay cached."""
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    return 2 if REHEARSAL else min(max(-(-4 * l2_bytes // max(num_bytes, 1)), 4), most)
