"""The options of `kvcache replay`: their names, and the values that they take."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable

from kvcache.cli.errors import UsageError, quoted
from kvcache.cli.events import add_events_options

# As in kvcache.checks, which imports numpy: --help does without it.
MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1
# Defaults: a pool that holds part of the workload, so that hits and evictions both show.
TRACE_BLOCK_SIZE, TRACE_NUM_BLOCKS = 512, 10_001
TIMED_CONCURRENCY = 256
CHAT_BLOCK_SIZE, CHAT_NUM_BLOCKS, CHAT_REQUESTS = 16, 1_025, 500


def add_replay_options(sub: argparse.ArgumentParser) -> None:
    """TRACE and all options, each value checked by itself."""
    sub.add_argument("trace", nargs="?", metavar="TRACE", help="file of requests; default: chats")
    sub.add_argument(
        "--format", metavar="FORM", help="of TRACE; default: the one that its first lines show"
    )
    block_size = f"tokens; default {TRACE_BLOCK_SIZE}, for chats {CHAT_BLOCK_SIZE}"
    num_blocks = f"null block counted; default {TRACE_NUM_BLOCKS}, for chats {CHAT_NUM_BLOCKS}"
    for option, least, most, text in (
        ("--block-size", 1, MAX_INT32, block_size),
        ("--num-blocks", 2, MAX_INT32, num_blocks),
        ("--limit", 1, MAX_INT32, "replay at most N requests"),
        ("--concurrency", 1, MAX_INT32, "requests that run at a time; default 1"),
        ("--hash-block-size", 1, MAX_INT32, "tokens; finer than blocks: hits end inside them, too"),
        ("--chunk-tokens", 1, MAX_INT32, "compute prompts in chunks of at most N tokens"),
        (
            "--host-blocks",
            0,
            MAX_INT32,
            "pages of a host tier, its null block counted; default none",
        ),
        (
            "--store-blocks",
            0,
            MAX_INT32,
            "blocks of a store under the other tiers, simulated by count; default none",
        ),
        ("--seed", 0, MAX_INT64, "of the chats; default 0"),
        ("--requests", 1, MAX_INT32, f"number of chat turns; default {CHAT_REQUESTS}"),
    ):
        sub.add_argument(option, metavar="N", type=number(option, least, most), help=text)
    sub.add_argument(
        "--groups",
        metavar="LIST",
        help="cache groups, kind[:option=value]... each, as full_attention,sliding_window:window=1024;"
        " block_size=N is an option of all kinds; default: one full_attention",
    )
    sub.add_argument(
        "--import",
        dest="imports",
        metavar="FILE.py",
        action="append",
        help="run a Python file first, which registers attention kinds for --groups",
    )
    add_policy_options(sub)
    sub.add_argument(
        "--compare",
        metavar="P,P",
        nargs="?",
        const="",
        help="replay with each of these policies at several sizes, and say which to choose; default "
        "policies: all that need no accesses and no priorities",
    )
    sub.add_argument(
        "--sizes",
        metavar="N,N",
        type=_sizes,
        help="of --compare, as --num-blocks; default: from an eighth of that to four times as much",
    )
    sub.add_argument(
        "--timed",
        metavar="P,D",
        nargs="?",
        const="",
        help="requests come as TRACE says, and hold their blocks while they run: prompts are computed "
        "one after another at P tokens per second, answers side by side at D each; default 20000,50. "
        f"--concurrency is then {TIMED_CONCURRENCY} unless it is given",
    )
    sub.add_argument(
        "--disaggregate",
        metavar="N[:option=value]...",
        help="prefill in a pool of N blocks, whose blocks a decode pool of --num-blocks loads under "
        "leases; options lease_s=60, gb_per_s=10, bytes_per_token=131072; timed, as --timed",
    )
    sub.add_argument(
        "--device", default="cpu", type=device_name, help="where --verify keeps KV; default cpu"
    )
    for option, text in (
        ("--verify", "write, read back and compare real KV (needs torch)"),
        ("--json", "one JSON object on stdout instead of a table"),
    ):
        sub.add_argument(option, action="store_true", help=text)
    sub.add_argument(
        "--plot",
        metavar="FILE.png",
        type=plot_file,
        help="draw the course of the replay, or with --compare hit rates by size",
    )
    add_events_options(sub)


def add_policy_options(sub: argparse.ArgumentParser) -> None:
    """What `kvcache.cli.policies` reads."""
    for option, metavar, text in (
        (
            "--eviction",
            "P",
            "policy[:option=value]... that chooses the cached block to evict; default lru",
        ),
        ("--host-eviction", "P", "the same of the host tier"),
        (
            "--host-write",
            "MODE",
            "when cached blocks are offloaded: back (default; when evicted), through (at once), "
            "selective[:N] (after N hits, default 2), or learned[:G] (when evicted, if so many "
            "hits are expected of it, default 0.05)",
        ),
    ):
        sub.add_argument(option, metavar=metavar, help=text)


def number(option: str, least: int, most: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise UsageError(
                f"{option} is {quoted(text)}: expected a whole number from {least} to {most}"
            )
        return value

    return convert


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(number("--sizes", 2, MAX_INT32), text.split(",")))


def plot_file(text: str) -> str:
    # os.path, not pathlib: a name too long for the system is then no folder, and no exception.
    folder = os.path.dirname(text) or "."
    if os.path.splitext(text)[1].lower() != ".png":
        raise UsageError(f"--plot is {text!r}: expected a file name that ends in .png")
    if not os.path.isdir(folder):
        raise UsageError(f"--plot is {text!r}: expected an existing folder, not {folder!r}")
    if os.path.isdir(text):
        raise UsageError(f"--plot is {text!r}: expected a file, not a directory")
    return text


def device_name(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", text):
        raise UsageError(f"--device is {quoted(text)}: expected cpu, cuda or cuda:N")
    return text
