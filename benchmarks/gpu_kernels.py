# SPDX-License-Identifier: Apache-2.0
"""GPU kernel times, and limits measured in the same run. Prints one line of JSON per result.

If a case fails, the failure is reported, and the remaining cases run. Calls that move tokens rotate
among input sets whose total size is four times that of the L2 cache. Pages are spread over 16 GiB
if enough memory is available.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from benchmarks import attention_metadata as metadata
from benchmarks.gpu import say, sizes
from benchmarks.gpu.timing import graph_us, num_rotated, stream_seconds
from benchmarks.receive import plain
from kvcache import AttentionMetadataBuilder, BlockTables, Pages, TableShape, ops
from kvcache.worker.pages.page_copy import PageCopy

_HEADS, _HEAD_SIZE, _BLOCK_SIZE = 8, 128, 16
_LAUNCHES = 20  # launches per graph, for calls that always use the same inputs


def copy_gb_per_s() -> float:
    """Return the bandwidth of a device copy (bytes read plus bytes written), which is the memory
    limit.

    The copies are submitted to a stream. In a graph, copies of 1 GiB and more took 1.5 times as long
    on an H200.
    """
    source = torch.empty(sizes.scaled(1 << 30), dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    seconds = stream_seconds(lambda: [target.copy_(source) for _ in range(4)], stream)
    return 4 * 2 * source.numel() / seconds / 1e9


def empty_kernel_us() -> float:
    """Time the cheapest launch: a table update without segments."""
    arena, packed = torch.zeros(2, 16, dtype=torch.int32, device="cuda")
    return repeated_us(lambda: ops.update_block_tables(arena, packed))


def repeated_us(call: Callable[[], None]) -> float:
    """Time calls on the same memory. Used for tables, which are also in the L2 cache in an engine."""
    return graph_us([call] * sizes.repeats(_LAUNCHES))


def slot_mapping(num_groups: int, name: str, num_requests: int, num_tokens: int) -> Iterator[dict]:
    """Map all groups in one launch, including padding at the end of the buffer."""
    tables = filled_tables(num_groups)
    rows = torch.arange(num_requests, device="cuda", dtype=torch.int32)
    per_request = num_tokens // num_requests
    start = torch.arange(num_requests + 1, device="cuda", dtype=torch.int32) * per_request
    first = torch.randint(0, 511 * 16 - per_request, (num_requests, 1), device="cuda")
    positions = (first + torch.arange(per_request, device="cuda")).flatten()
    token_rows = rows.repeat_interleave(per_request)
    fact = {"kernel": "slot_mapping", "case": name, "groups": num_groups}
    us = repeated_us(lambda: tables.compute_slot_mapping(token_rows, positions))
    yield {**fact, "form": "rows per token", "us": us}
    us = repeated_us(lambda: tables.compute_slot_mapping(rows, positions, query_start_loc=start))
    yield {**fact, "form": "query_start_loc", "us": us}


def tables_of_a_step(num_groups: int, num_requests: int) -> Iterator[dict]:
    """Gather a decode step's tables in batch order, and apply updates to the tables."""
    tables = filled_tables(num_groups)
    rows = torch.randperm(1024, device="cuda")[:num_requests].int()
    fact = {"case": f"decode {num_requests}", "groups": num_groups}
    us = repeated_us(lambda: tables.gather(rows, max_num_tokens=8192))
    moved = 2 * 4 * num_groups * num_requests * 512
    yield {"kernel": "gather_block_tables", **fact, "us": us, "gb_per_s": moved / us / 1e3}
    for name, length in (("one block per row", 1), ("32 blocks per row", 32)):
        arena = torch.zeros(num_groups * 1024 * 512, dtype=torch.int32, device="cuda")
        packed = updates(num_groups * num_requests, length).cuda()
        us = repeated_us(lambda: ops.update_block_tables(arena, packed))  # noqa: B023
        yield {"kernel": "update_block_tables", **fact, "form": name, "us": us}


def attention_metadata(name: str, num_requests: int, query_len: int) -> Iterator[dict]:
    """Build the attention metadata of a batch in one launch, with 4 groups and lengths on the device."""
    rows, query_lens, seq_lens = metadata.batch_of(num_requests, query_len)
    there = [torch.from_numpy(each).cuda() for each in (rows, query_lens, seq_lens)]
    builder = AttentionMetadataBuilder(metadata.tables_of(num_requests, "cuda"))
    fact = {"kernel": "attention_metadata", "case": name}
    us = repeated_us(lambda: builder.build(*there))
    yield {**fact, "form": "all columns", "us": us}
    # Columns beyond max_seq_len are zeroed by separate launches.
    longest = int(seq_lens.max())
    us = repeated_us(lambda: builder.build(*there, max_seq_len=longest))
    yield {**fact, "form": "max_seq_len", "us": us}


def filled_tables(num_groups: int) -> BlockTables:
    """Create 1,024 rows of 511 blocks in each group."""
    tables = BlockTables(
        [TableShape(16, 512)] * num_groups, max_num_reqs=1024, max_num_tokens=8192, device="cuda"
    )
    generator = np.random.default_rng(0)
    for row in range(1024):
        ids = generator.integers(1, 1 << 20, (num_groups, 511)).astype(np.int32)
        tables.add_row(list(ids), row)
    tables.commit_updates()
    return tables


def updates(num_segments: int, length: int) -> torch.Tensor:
    """Return updates with `num_segments` segments of `length` blocks. Segments start 512 entries
    apart.
    """
    entries = torch.arange(num_segments) * 512
    at = 1 + 3 * num_segments + torch.arange(num_segments) * length
    places = torch.stack([entries, torch.full_like(entries, length), at], 1)
    values = torch.arange(num_segments * length)
    return torch.cat([torch.tensor([num_segments]), places.flatten(), values]).int()


def token_io(
    limit: float | None,
    num_tokens: int,
    layout: str,
    fp8: torch.dtype | None = None,
    num_layers: int | None = None,
) -> Iterator[dict]:
    """Write and gather bfloat16 tokens with 8 heads of 128 elements.

    `num_layers`: number of layers per launch.
    """
    num_tokens = sizes.scaled(num_tokens, 16)
    layers = () if num_layers is None else (num_layers,)
    shape = (*layers, num_tokens, _HEADS, _HEAD_SIZE)
    element = 1 if fp8 else 2
    # K and V: each element is read on one side and written on the other.
    moved = 2 * int(np.prod(shape)) * (2 + element)
    sets = num_rotated(moved)
    num_blocks = 1 + -(-sets * num_tokens // _BLOCK_SIZE)
    caches = [cache(num_blocks, layout, fp8, layers) for _ in "kv"]
    tokens = [[torch.randn(shape, device="cuda").bfloat16() for _ in "kv"] for _ in range(sets)]
    # Exclude slots of the null block, because writes to it are dropped.
    slots = _BLOCK_SIZE + torch.randperm(sets * num_tokens, device="cuda").view(sets, num_tokens)
    scales = [torch.full((*layers, 1), 0.37, device="cuda")] * 2 if fp8 else []
    case = f"{num_tokens} tokens, {layout}, {_HEADS} heads of {_HEAD_SIZE}, bf16"
    case += f" in {str(fp8).removeprefix('torch.')}" if fp8 else ""
    case += f", {num_layers} layers" if num_layers else ""
    writes = [
        partial(ops.write_kv, *pair, *caches, each, *scales) for pair, each in zip(tokens, slots)
    ]
    gathers = [
        partial(ops.gather_kv, *caches, each, *pair, *scales) for pair, each in zip(tokens, slots)
    ]
    for name, calls in (("write_kv", writes), ("gather_kv", gathers)):
        us = graph_us(calls)
        fact = {"kernel": name, "case": case, "input_sets": sets}
        yield {**fact, **rate(moved, us, limit), **plain_token_io(name, caches, tokens, slots, us)}


def plain_token_io(
    name: str,
    caches: list[torch.Tensor],
    tokens: list[list[torch.Tensor]],
    slots: torch.Tensor,
    us: float,
) -> dict:
    """Measure torch's indexing, if the cache is a plain array of slots of the tokens' dtype."""
    if (
        caches[0].dim() != 4
        or caches[0].dtype != tokens[0][0].dtype
        or not caches[0].is_contiguous()
    ):
        return {}
    flat = [each.flatten(0, 1) for each in caches]

    def one(pair: list[torch.Tensor], at: torch.Tensor) -> None:
        for side, token in zip(flat, pair):
            if name == "write_kv":
                side.index_copy_(0, at, token)
            else:
                torch.index_select(side, 0, at, out=token)

    plain_us = graph_us([partial(one, *each) for each in zip(tokens, slots)])
    return {"plain_us": plain_us, "times_plain": plain_us / us}


def cache(
    num_blocks: int, layout: str, fp8: torch.dtype | None, layers: tuple[int, ...]
) -> torch.Tensor:
    """Create a cache of random numbers."""
    order = (_BLOCK_SIZE, _HEADS) if layout == "NHD" else (_HEADS, _BLOCK_SIZE)
    drawn = torch.randn(*layers, num_blocks, *order, _HEAD_SIZE, device="cuda").bfloat16()
    drawn = drawn.to(fp8 or drawn.dtype)
    return drawn if layout == "NHD" else drawn.transpose(-3, -2)


def block_copy(limit: float | None, fragment: int) -> Iterator[dict]:
    """Copy pages within the device, over 32 regions, with ids on the device as in a captured graph."""
    num_blocks = max(sizes.pool_bytes(16 << 30, on_host=False) // (32 * fragment), 4)
    pages = Pages.allocate(num_blocks, [[fragment, fragment]] * 16, device="cuda")
    pages.memory.random_(0, 256)
    # A total of 2 GiB is read and written.
    count = min(num_blocks // 4, max(sizes.scaled(1 << 30) // pages.page_bytes, 1))
    ids = torch.randperm(num_blocks, device="cuda", dtype=torch.int32)[: 2 * count]
    page_copy, pairs = PageCopy(pages, pages), ids.view(-1, 2).contiguous()
    us = graph_us([lambda: page_copy.copy(pairs)] * 4, 10)
    fact = {"kernel": "copy_blocks", "case": f"fragments of {fragment >> 10} KiB"}
    fact |= {"pairs": count, "pool": pages.num_bytes}
    yield {**fact, **rate(2 * count * pages.page_bytes, us, limit)}


def receive(limit: float | None, block_size: int, layout: str, ratio: int) -> Iterator[dict]:
    """Permute received bf16 blocks with 8 heads of 128 elements, compared with plain torch
    operations.
    """
    # The cache has at least 1 GiB and at least ten times the size of the L2 cache.
    num_blocks = sizes.scaled(max(16384, 524288 // block_size), 8)
    order = (_HEADS, block_size) if layout == "HND" else (block_size, _HEADS)
    memory = torch.randn(num_blocks, *order, _HEAD_SIZE, device="cuda", dtype=torch.bfloat16)
    local = memory.transpose(1, 2) if layout == "HND" else memory
    ids = torch.randperm(num_blocks, device="cuda")[: num_blocks // 2]
    indices, offsets = ids.int()[:, None].contiguous(), torch.tensor([0])
    us = graph_us(
        [lambda: ops.permute_blocks_(local, offsets, indices, block_size // ratio, True)] * 4, 10
    )
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    plain_us = 1e6 * stream_seconds(lambda: plain(local, ids, ratio, layout == "HND"), stream)
    case = f"{len(ids)} blocks of {block_size}, {layout}, remote {block_size // ratio} HND"
    yield {
        "kernel": "permute_blocks_",
        "case": case,
        **rate(2 * memory.numel(), us, limit),  # half the blocks are read and written
        "plain_us": plain_us,
        "times_plain": plain_us / us,
    }


def rate(moved: int, us: float, limit: float | None) -> dict:
    """Return the time, the GB/s read and written, and the ratio to a device copy if one was measured."""
    gb_per_s = moved / us / 1e3
    share = {"of_copy": gb_per_s / limit} if limit else {}
    return {"us": us, "gb_per_s": gb_per_s, **share}


def cases(limit: float | None) -> Iterator[tuple[str, Callable[[], Iterator[dict]]]]:
    """Yield all cases with their names. Cases with a target come first."""
    yield from cases_of_memory(limit)
    yield from cases_of_tables()


def cases_of_memory(limit: float | None) -> Iterator[tuple[str, Callable[[], Iterator[dict]]]]:
    """Yield the cases that are compared with a copy on the device."""
    for block_size in (16, 32, 64, 128):
        for layout, ratio in (("HND", 2), ("HND", 4), ("NHD", 1), ("NHD", 2), ("NHD", 4)):
            name = f"receive {layout} {block_size} / {ratio}"
            yield name, partial(receive, limit, block_size, layout, ratio)
    for fragment in (4 << 10, 16 << 10, 64 << 10, 1 << 20):
        yield f"copy_blocks {fragment >> 10} KiB", partial(block_copy, limit, fragment)
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    for layout in ("NHD", "HND"):
        for num_tokens in (256, 8192):
            yield f"tokens {layout}", partial(token_io, limit, num_tokens, layout)
            yield f"tokens {layout} e4m3", partial(token_io, limit, num_tokens, layout, e4m3)
        yield f"tokens {layout}, layers", partial(token_io, limit, 1024, layout, num_layers=8)
    yield "tokens e5m2", partial(token_io, limit, 8192, "NHD", e5m2)
    yield "tokens e4m3, layers", partial(token_io, limit, 1024, "NHD", e4m3, 8)


def cases_of_tables() -> Iterator[tuple[str, Callable[[], Iterator[dict]]]]:
    """Yield the cases of small kernels, whose time is mostly that of a launch."""
    for num_tokens in (1, 256):
        yield f"{num_tokens} tokens", partial(token_io, None, num_tokens, "NHD")
    for num_groups in (1, 4):
        for name, requests, tokens in (
            ("decode 256", 256, 256),
            ("decode 1024", 1024, 1024),
            ("prefill 8192", 8, 8192),
        ):
            yield f"slots {name}", partial(slot_mapping, num_groups, name, requests, tokens)
        for requests in (256, 1024):
            yield f"tables {requests}", partial(tables_of_a_step, num_groups, requests)
    for each in metadata.cases():
        yield f"metadata {each[0]}", partial(attention_metadata, *each)


def main() -> int:
    limit = None
    with say.attempt("copy on the device"):
        limit = copy_gb_per_s()
        say.row(kernel="copy", gb_per_s=limit)
        say.learned(f"copy on the device {limit:,.0f} GB/s")
    with say.attempt("empty kernel"):
        empty_us = empty_kernel_us()
        say.row(kernel="empty", us=empty_us)
        say.learned(f"an empty kernel {empty_us:.1f} us")
    rows: list[dict] = []
    for name, case in cases(limit):
        if say.seconds_left() < 1:
            say.skipped(f"{name}: no time left")
            continue
        with say.attempt(name):
            for row in case():
                say.row(**row)
                rows.append(row)
        torch.cuda.empty_cache()
    for text in summary(rows):
        say.learned(text)
    return say.exit_code()


def summary(rows: list[dict]) -> Iterator[str]:
    """Yield one line per kernel with its slowest and its fastest case."""
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        found = [row for row in rows if row["kernel"] == kernel]
        key = "of_copy" if "of_copy" in found[0] else "us"
        found = [row for row in found if key in row]
        low, high = (choose(found, key=lambda row: row[key]) for choose in (min, max))
        form = "{:.0%} of the copy" if key == "of_copy" else "{:.1f} us"
        text = f"{kernel}, {len(found)} cases: {form.format(low[key])} ({low['case']})"
        yield f"{text} to {form.format(high[key])} ({high['case']})"


if __name__ == "__main__":
    say.ready()
    sys.exit(main())
