"""`python -m benchmarks.eviction`: hit rates of the eviction policies on the conversation trace."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvcache.replay import Replayer, ReplayReport, WorkloadRequest, read_mooncake
from kvcache.replay.policies import parse_eviction, parse_host_eviction, parse_host_write

TRACE = Path(__file__).resolve().parents[2] / "shared/traces/mooncake_conversation.jsonl"
BLOCK_SIZE = 512  # tokens
CAPACITIES = (1_000, 10_000, 30_000, 50_000, 100_000)  # blocks of the device alone
POLICIES = (
    "lru",
    "last_access",
    "priority",
    "s3_fifo",
    "s3_fifo:small_share=0.9",
    "segmented_lru",
    "segmented_lru:protected_share=0.5",
    "segmented_lru:protected_share=0.2",
)
DEVICE_CAPACITIES, HOST_CAPACITIES = (1_000, 10_000), (10_000, 30_000, 100_000)
PAIRS = (  # policies of device and host
    ("lru", "lru"),
    ("s3_fifo", "lru"),
    ("segmented_lru:protected_share=0.2", "lru"),
    ("lru", "s3_fifo"),
    ("lru", "segmented_lru:protected_share=0.2"),
)
WRITES = ("back", "through", "selective:1", "selective:2")
WRITES_TO = 30_000

BEFORE = """\
# Eviction

The eviction policy chooses the cached block that is evicted when its space is needed:
`KVCacheManager(..., eviction=, eviction_options=)`, and `host_eviction=, host_eviction_options=` for \
the
host tier. Under every policy uncached blocks go first and pinned blocks last. A block is not evicted \
before
the blocks that are found only through it; on the device, `lru` achieves this because requests \
release their
tails first. Blocks of windows and recurrent states are not found through others. The host tier gets no
accesses and no priorities: use `lru`, `s3_fifo` or `segmented_lru` there.

| policy | option | which cached block goes first |
|---|---|---|
| `lru` | | the least recently released |
| `last_access` | | the least recently accessed (`KVCacheManager.access`); among blocks without an \
access the least recently released; then the longest prefix |
| `priority` | `default_priority` (35) | the lowest priority that `free(..., retention=)` gave, until \
it expires; then the least recently released |
| `s3_fifo` | `small_share` (0.1) | in a small queue the oldest block without two hits, then in a \
large queue the oldest without a hit since its last turn |
| `segmented_lru` | `protected_share` (0.8) | blocks that were never hit; then the least recently \
released. At most that share of the pool is protected |

How to choose:

- `lru` where nothing is known. It costs least. Below, nothing beats it at 50,000 blocks and more, and
  only one setting does at all smaller sizes.
- `priority` where the caller knows what will come again (system prompts) or will not. Priorities \
come only
  from `free`, and these replays give none.
- `last_access` where the caller knows of accesses that are not requests to this pool. These replays \
have
  none.
- `s3_fifo`, `segmented_lru` where the cache is far smaller than what is used again: a block that was \
hit
  outlives one that never was. With their usual options they cost hits here at 10,000 to 50,000 blocks:
  replay your own trace before you choose one:

        kvcache replay trace.jsonl --num-blocks 10001 --eviction segmented_lru:protected_share=0.2
"""

DEVICE = """\
## On the device alone

Token hit rates of the conversation trace (12,031 requests, {block_size}-token blocks, one at a time,
prompts only), by capacity in blocks. No cache of any size reaches more than 0.3734.
"""

OPTIMUM = """\
The optimum is far: of all accessed blocks (not of tokens, so a little below the table), a clairvoyant
eviction finds 0.191 at 1,000 blocks and 0.366 at 10,000, where `lru` finds 0.045 and 0.211.
"""

HOST = """\
## With a host tier

The same, all hits counted, those on the host too. Blocks are written to the host when they are evicted
from the device (`host_write="back"`), and stay there when they are loaded.
"""

HOST_WRITES = """\
## When to write to the host

`lru` on both, {host:,} blocks on the host. Hits that `selective` counts are hits on the device: where
that is small, few blocks live there long enough to be hit, and hardly anything is written.
"""

AFTER = """\
Made by `python -m benchmarks.eviction --write docs/eviction.md`. The replays are exact: they come out the
same anywhere.
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.eviction", description=__doc__)
    parser.add_argument("--trace", type=Path, default=TRACE, help="JSONL file in Mooncake's format")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page there as well")
    args = parser.parse_args()
    if not args.trace.is_file():
        parser.error(f"--trace is {str(args.trace)!r}: expected an existing file")
    parts = []
    for part in page(args.trace):
        parts.append(part)
        print(part, flush=True)
    if args.write:
        args.write.write_text("\n".join(parts))
    return 0


def page(trace: Path) -> Iterable[str]:
    """The parts of docs/eviction.md, each when it is known."""
    no_content = np.empty(0, np.int64)  # only verification asks for it
    requests = [replace(each, content=no_content) for each in read_mooncake(trace)]
    yield BEFORE
    yield DEVICE.format(block_size=BLOCK_SIZE)
    rates = {
        policy: [replayed(requests, size, policy).token_hit_rate for size in CAPACITIES]
        for policy in POLICIES
    }
    yield rate_table(("policy",), {(name,): each for name, each in rates.items()}, CAPACITIES)
    yield "".join(compared(name, each, rates["lru"]) for name, each in rates.items())
    yield OPTIMUM
    yield HOST
    yield rate_table(
        ("device blocks", "device policy", "host policy"),
        {
            (f"{device:,}", *pair): [
                replayed(requests, device, pair[0], host, pair[1]).token_hit_rate
                for host in HOST_CAPACITIES
            ]
            for device in DEVICE_CAPACITIES
            for pair in PAIRS
        },
        HOST_CAPACITIES,
    )
    yield HOST_WRITES.format(host=WRITES_TO)
    yield write_table(
        {
            (device, mode): replayed(requests, device, "lru", WRITES_TO, host_write=mode)
            for device in DEVICE_CAPACITIES
            for mode in WRITES
        }
    )
    yield AFTER


def replayed(
    requests: Sequence[WorkloadRequest],
    capacity: int,
    eviction: str,
    host_capacity: int = 0,
    host_eviction: str = "lru",
    host_write: str = "back",
) -> ReplayReport:
    """One request at a time; capacities without the null block."""
    name, options = parse_eviction(eviction)
    host_name, host_options = parse_host_eviction(host_eviction)
    replayer = Replayer(
        block_size=BLOCK_SIZE,
        num_blocks=capacity + 1,
        eviction=name,
        eviction_options=options,
        num_host_blocks=host_capacity + 1 if host_capacity else 0,
        host_eviction=host_name,
        host_eviction_options=host_options,
        **parse_host_write(host_write),
    )
    return replayer.run(requests)


def rate_table(
    names: Sequence[str], rates: dict[tuple[str, ...], list[float]], columns: Sequence[int]
) -> str:
    lines = [*names, *(f"{column:,}" for column in columns)], ["---"] * (len(names) + len(columns))
    rows = [[*key, *(f"{rate:.4f}" for rate in each)] for key, each in rates.items()]
    return markdown([*lines, *rows])


def write_table(reports: dict[tuple[int, str], ReplayReport]) -> str:
    rows = [
        [
            f"{device:,}",
            mode,
            f"{report.token_hit_rate:.4f}",
            f"{report.host_hit_tokens:,}",
            f"{report.written_blocks:,}",
            f"{report.loaded_blocks:,}",
        ]
        for (device, mode), report in reports.items()
    ]
    heads = ["device blocks", "write", "token hit rate", "host tokens hit", "written", "loaded"]
    return markdown([heads, ["---"] * len(heads), *rows])


def compared(name: str, rates: list[float], lru: list[float]) -> str:
    """A line for a policy: where it is better than LRU, and where worse, to the digits shown."""
    if rates is lru:
        return ""
    gains = [round(rate, 4) - round(base, 4) for rate, base in zip(rates, lru)]
    found = []
    for what, is_so in (
        ("better than `lru`", lambda gain: gain > 0),
        ("worse than `lru`", lambda gain: gain < 0),
        ("as `lru`", lambda gain: gain == 0),
    ):
        sizes = [f"{size:,}" for size, gain in zip(CAPACITIES, gains) if is_so(gain)]
        if sizes:
            found.append(f"{what} at " + ("all" if len(sizes) == len(gains) else ", ".join(sizes)))
    return f"- `{name}`: {'; '.join(found)}.\n"


def markdown(rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
