"""Kernel times on a GPU, beside the limits measured in the same run. Prints one JSON object last."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator

import torch

from kvcache import ops

ROUNDS = 30


def graph_us(function: Callable[[], None], launches: int = 20) -> float:
    """Median microseconds of one call inside a captured graph: launch gaps shrink to the device's."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        function()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(launches):
            function()
    graph.replay()
    times = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / launches)
    return statistics.median(times)


def copy_gb_per_s() -> float:
    """Device-to-device copy, bytes read plus bytes written: the memory's limit."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / graph_us(lambda: target.copy_(source), 4) / 1e3


def empty_kernel_us() -> float:
    """The cheapest launch there is: one element set."""
    x = torch.zeros(1, device="cuda")
    return graph_us(lambda: x.zero_())


def slot_mapping() -> Iterator[dict]:
    for name, num_rows, num_tokens in (
        ("decode 256", 256, 256),
        ("decode 1024", 1024, 1024),
        ("prefill 8192", 16, 8192),
    ):
        table = torch.randint(0, 1 << 20, (num_rows, 512), device="cuda", dtype=torch.int32)
        rows = torch.arange(num_tokens, device="cuda", dtype=torch.int32) * num_rows // num_tokens
        positions = torch.randint(0, 512 * 16, (num_tokens,), device="cuda")
        out = torch.empty(8192, dtype=torch.int64, device="cuda")
        us = graph_us(lambda: ops.slot_mapping(table, rows, positions, 16, out))  # noqa: B023
        yield {"kernel": "slot_mapping", "case": name, "groups": 1, "us": us}


def token_io(limit: float) -> Iterator[dict]:
    for layout in ("NHD", "HND"):
        shape = (4096, 16, 8, 128) if layout == "NHD" else (4096, 8, 16, 128)
        caches = [torch.randn(shape, device="cuda").bfloat16() for _ in range(2)]
        caches = [c if layout == "NHD" else c.transpose(1, 2) for c in caches]
        for num_tokens in (256, 8192):
            key, value = (torch.randn(num_tokens, 8, 128, device="cuda").bfloat16() for _ in "kv")
            slots = torch.randperm(4096 * 16, device="cuda")[:num_tokens]
            moved = 2 * 2 * key.numel() * 2  # K and V, read and written, two bytes each
            for name, call in (
                ("write_kv", lambda: ops.write_kv(key, value, *caches, slots)),  # noqa: B023
                ("gather_kv", lambda: ops.gather_kv(*caches, slots, key, value)),  # noqa: B023
            ):
                us = graph_us(call)
                rate = moved / us / 1e3
                yield {
                    "kernel": name,
                    "case": f"{num_tokens} tokens, {layout}, 8 heads of 128, bf16",
                    "us": us,
                    "gb_per_s": rate,
                    "of_copy": rate / limit,
                }


def main() -> int:
    limit = copy_gb_per_s()
    results = {"copy_gb_per_s": limit, "empty_kernel_us": empty_kernel_us()}
    results["kernels"] = [*slot_mapping(), *token_io(limit)]
    for line in results["kernels"]:
        print(line)
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
