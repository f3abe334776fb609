# SPDX-License-Identifier: Apache-2.0
"""The options of `kvcache replay`."""

from __future__ import annotations

import argparse
import os
from contextlib import suppress

from kvcache_exchange.cli.parsing import (
    MAX_INT32,
    MAX_INT64,
    add_policy_options,
    device_name,
    number,
    plot_file,
)

# Default sizes. The pool holds only part of the workload, so that both hits and evictions occur.
TRACE_BLOCK_SIZE, TRACE_NUM_BLOCKS = 512, 10_001
TIMED_CONCURRENCY = 256
CHAT_BLOCK_SIZE, CHAT_NUM_BLOCKS, CHAT_REQUESTS = 16, 1_025, 500

BLOCK_SIZE_HELP = (
    f"tokens per block; default: those of the trace's block IDs, for other traces {TRACE_BLOCK_SIZE}, "
    f"for chats {CHAT_BLOCK_SIZE}"
)


def default_block_size(trace: str | None, form: str | None) -> int:
    """Return the block size for a trace, or for generated chats. Errors are left to the replay."""
    if trace is None:
        return CHAT_BLOCK_SIZE
    from kvcache_lab import TraceError, read_trace

    found = None
    if os.path.isfile(trace):  # a pipe can be read only once
        with suppress(OSError, TraceError, ValueError):
            found = next(read_trace(trace, form), None)
    return (found.tokens_per_id if found else 0) or TRACE_BLOCK_SIZE


def add_replay_options(sub: argparse.ArgumentParser) -> None:
    """Add TRACE and all options. Each option validates its value."""
    sub.add_argument(
        "trace", nargs="?", metavar="TRACE", help="trace file; default: generated chats"
    )
    sub.add_argument(
        "--format", metavar="FORM", help="trace format; default: detected from the first lines"
    )
    num_blocks = (
        "blocks of the pool, including the null block; "
        f"default {TRACE_NUM_BLOCKS}, for chats {CHAT_NUM_BLOCKS}"
    )
    for option, least, most, text in (
        ("--block-size", 1, MAX_INT32, BLOCK_SIZE_HELP),
        ("--num-blocks", 2, MAX_INT32, num_blocks),
        ("--limit", 1, MAX_INT32, "replay at most N requests"),
        ("--concurrency", 1, MAX_INT32, "number of concurrent requests; default 1"),
        ("--hash-block-size", 1, MAX_INT32, "tokens per hash; allows hits that end inside blocks"),
        ("--chunk-tokens", 1, MAX_INT32, "compute prompts in chunks of at most N tokens"),
        (
            "--host-blocks",
            0,
            MAX_INT32,
            "size of the host tier, including its null block; default none",
        ),
        (
            "--store-blocks",
            0,
            MAX_INT32,
            "size of a simulated store below the other tiers; default none",
        ),
        ("--seed", 0, MAX_INT64, "seed of the generated chats; default 0"),
        ("--requests", 1, MAX_INT32, f"number of chat turns; default {CHAT_REQUESTS}"),
    ):
        sub.add_argument(option, metavar="N", type=number(option, least, most), help=text)
    sub.add_argument(
        "--groups",
        metavar="LIST",
        help="cache groups as kind[:option=value],..., e.g. full_attention,sliding_window:window=1024;"
        " every kind accepts block_size=N; default full_attention",
    )
    sub.add_argument(
        "--import",
        dest="imports",
        metavar="FILE.py",
        action="append",
        help="first run a Python file that registers attention kinds or trace formats",
    )
    add_policy_options(sub)
    sub.add_argument(
        "--compare",
        metavar="P,P",
        nargs="?",
        const="",
        help="replay each policy at several pool sizes and recommend one; default: all policies that "
        "need neither access times nor priorities",
    )
    sub.add_argument(
        "--sizes",
        metavar="N,N",
        type=_sizes,
        help="pool sizes for --compare; default: 1/8 to 4 times --num-blocks",
    )
    sub.add_argument(
        "--timed",
        metavar="P,D[,HOST[,STORE]][ NAME=VALUE]...",
        nargs="?",
        const="",
        help="requests arrive at their trace times and hold their blocks while they run: prefill runs "
        "one prompt at a time at P tokens/s, decode concurrently at D tokens/s each; default 20000,50. "
        "P,D,HOST,STORE also sets the tokens/s at which hits load from the host and the store; default: "
        "loads take no time. Names: prefill_ms, attention_ns and interference (docs/replay.md). "
        f"--concurrency then defaults to {TIMED_CONCURRENCY}",
    )
    sub.add_argument(
        "--device",
        default="cpu",
        type=device_name,
        help="device for the KV of --verify; default cpu",
    )
    sub.add_argument(
        "--kv-format",
        metavar="NAME",
        help="quantized format (docs/formats.md) in which --verify stores the KV; default: none",
    )
    for option, text in (
        ("--verify", "write, read and compare real KV (needs torch)"),
        ("--why", "also print why prompt tokens were not found in the cache"),
        ("--json", "print one JSON object instead of a table"),
    ):
        sub.add_argument(option, action="store_true", help=text)
    sub.add_argument(
        "--plot",
        metavar="FILE.png",
        type=plot_file,
        help="plot the progress of the replay or, with --compare, hit rates by pool size",
    )


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(number("--sizes", 2, MAX_INT32), text.split(",")))
