"""Kernel times on a GPU, beside the limits measured in the same run. Prints one JSON object last."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator

import numpy as np
import torch

from benchmarks.receive import plain
from kvcache import MultiGroupBlockTable, Pages, ops
from kvcache.worker.route import Route

ROUNDS = 30


def graph_us(function: Callable[[], None], launches: int = 20) -> float:
    """Median microseconds of one call inside a captured graph: launch gaps shrink to the device's."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
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
    """All groups in one launch, with the buffer's tail padded; and what a decode step adds."""
    for num_groups in (1, 4):
        for name, num_requests, num_tokens in (
            ("decode 256", 256, 256),
            ("decode 1024", 1024, 1024),
            ("prefill 8192", 8, 8192),
        ):
            tables = filled_tables(num_groups)
            rows = torch.arange(num_requests, device="cuda", dtype=torch.int32)
            per_request = num_tokens // num_requests
            start = torch.arange(num_requests + 1, device="cuda", dtype=torch.int32) * per_request
            first = torch.randint(0, 511 * 16 - per_request, (num_requests, 1), device="cuda")
            positions = (first + torch.arange(per_request, device="cuda")).flatten()
            token_rows = rows.repeat_interleave(per_request)
            fact = {"case": name, "groups": num_groups}
            for form, call in (
                ("rows per token", lambda: tables.compute_slot_mapping(token_rows, positions)),  # noqa: B023
                (
                    "query_start_loc",
                    lambda: tables.compute_slot_mapping(rows, positions, query_start_loc=start),  # noqa: B023
                ),
            ):
                yield {"kernel": "slot_mapping", **fact, "form": form, "us": graph_us(call)}
            if name.startswith("decode"):
                us = graph_us(lambda: tables.gather(rows, max_num_tokens=8192))  # noqa: B023
                yield {"kernel": "gather_block_tables", **fact, "us": us}
                yield {
                    "kernel": "update_block_tables",
                    **fact,
                    "us": update_us(tables, num_requests),
                }


def filled_tables(num_groups: int) -> MultiGroupBlockTable:
    tables = MultiGroupBlockTable(1024, 8192, 8192, True, "cuda", [16] * num_groups)
    generator = np.random.default_rng(0)
    for row in range(1024):
        ids = generator.integers(1, 1 << 20, (num_groups, 511)).astype(np.int32)
        tables.add_row(list(ids), row)
    tables.commit_updates()
    return tables


def update_us(tables: MultiGroupBlockTable, num_requests: int) -> float:
    """One launch that puts one new block in each row of each group in place."""
    groups = len(tables)
    entries = torch.arange(groups * num_requests, dtype=torch.int32) * 512
    header = 1 + 3 * len(entries)
    places = torch.stack(
        [entries, torch.ones_like(entries), header + torch.arange(len(entries))], 1
    )
    count = torch.tensor([len(entries)])
    packed = torch.cat([count, places.flatten(), torch.arange(len(entries))]).int().cuda()
    arena = torch.zeros(groups * 1024 * 512, dtype=torch.int32, device="cuda")
    return graph_us(lambda: ops.update_block_tables(arena, packed))


def token_io(limit: float) -> Iterator[dict]:
    for layout in ("NHD", "HND"):
        for num_tokens in (256, 8192):
            yield from token_io_case(limit, num_tokens, layout)
            yield from token_io_case(limit, num_tokens, layout, fp8=torch.float8_e4m3fn)
        yield from token_io_case(limit, 1024, layout, num_layers=8)
    yield from token_io_case(limit, 8192, "NHD", fp8=torch.float8_e5m2)
    yield from token_io_case(limit, 1024, "NHD", fp8=torch.float8_e4m3fn, num_layers=8)


def token_io_case(
    limit: float,
    num_tokens: int,
    layout: str,
    fp8: torch.dtype | None = None,
    num_layers: int | None = None,
) -> Iterator[dict]:
    """8 heads of 128, bfloat16 tokens; all layers in one launch where there are layers."""
    layers = () if num_layers is None else (num_layers,)
    order = (16, 8) if layout == "NHD" else (8, 16)
    caches = [
        torch.randn(*layers, 4096, *order, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv"
    ]
    caches = [c.to(fp8 or c.dtype) for c in caches]
    caches = [c if layout == "NHD" else c.transpose(-3, -2) for c in caches]
    key, value = (torch.randn(*layers, num_tokens, 8, 128, device="cuda").bfloat16() for _ in "kv")
    slots = torch.randperm(4096 * 16, device="cuda")[:num_tokens]
    scales = [torch.full((*layers, 1), 0.37, device="cuda")] * 2 if fp8 else []
    # K and V, each element read on one side and written on the other.
    moved = 2 * key.numel() * (key.element_size() + caches[0].element_size())
    case = f"{num_tokens} tokens, {layout}, 8 heads of 128, bf16"
    case += f" in {str(fp8).removeprefix('torch.')}" if fp8 else ""
    case += f", {num_layers} layers" if num_layers else ""
    for name, call in (
        ("write_kv", lambda: ops.write_kv(key, value, *caches, slots, *scales)),
        ("gather_kv", lambda: ops.gather_kv(*caches, slots, key, value, *scales)),
    ):
        us = graph_us(call)
        rate = moved / us / 1e3
        yield {"kernel": name, "case": case, "us": us, "gb_per_s": rate, "of_copy": rate / limit}


def block_copy(limit: float) -> Iterator[dict]:
    """Pages within the device, over 32 regions; ids on the device, as a captured graph has them."""
    for fragment in (4 << 10, 16 << 10, 64 << 10, 1 << 20):
        num_blocks = (4 << 30) // (32 * fragment)
        pages = Pages.allocate(num_blocks, [[fragment, fragment]] * 16, device="cuda")
        pages.memory.random_(0, 256)
        ids = torch.randperm(num_blocks, device="cuda", dtype=torch.int32)[: num_blocks // 4 * 2]
        pairs = ids.view(-1, 2).contiguous()
        route = Route(pages, pages)
        us = graph_us(lambda: route.copy(pairs), 4)  # noqa: B023
        rate = 2 * len(pairs) * pages.page_bytes / us / 1e3
        fact = {"kernel": "copy_blocks", "case": f"fragments of {fragment >> 10} KiB", "us": us}
        yield {**fact, "gb_per_s": rate, "of_copy": rate / limit}


def receive(limit: float) -> Iterator[dict]:
    """Received blocks made local ones, bf16, 8 heads of 128, beside the plain form of it."""
    for block_size in (16, 32, 64, 128):
        num_blocks = max(16384, 524288 // block_size)  # 1 GiB and more, ten times the L2 and more
        for layout, ratio in (("HND", 2), ("HND", 4), ("NHD", 1), ("NHD", 2), ("NHD", 4)):
            order = (8, block_size) if layout == "HND" else (block_size, 8)
            cache = torch.randn(num_blocks, *order, 128, device="cuda", dtype=torch.bfloat16)
            cache = cache.transpose(1, 2) if layout == "HND" else cache
            ids = torch.randperm(num_blocks, device="cuda")[: num_blocks // 2]
            indices, offsets = ids.int()[:, None].contiguous(), torch.tensor([0])
            us = graph_us(
                lambda: ops.permute_blocks_(cache, offsets, indices, block_size // ratio, True),  # noqa: B023
                4,
            )
            plain_us = graph_us(lambda: plain(cache, ids, ratio, layout == "HND"), 1)  # noqa: B023
            rate = 2 * cache.numel() / us / 1e3  # half the blocks, two bytes each, read and written
            yield {
                "kernel": "permute_blocks_",
                "case": f"{len(ids)} blocks of {block_size}, {layout}, remote {block_size // ratio} HND",
                "us": us,
                "gb_per_s": rate,
                "of_copy": rate / limit,
                "plain_us": plain_us,
                "times_plain": plain_us / us,
            }


def main() -> int:
    limit = copy_gb_per_s()
    results = {"copy_gb_per_s": limit, "empty_kernel_us": empty_kernel_us()}
    results["kernels"] = [
        *slot_mapping(),
        *token_io(limit),
        *block_copy(limit),
        *receive(limit),
    ]
    for line in results["kernels"]:
        print(line)
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
