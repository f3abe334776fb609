"""`python -m benchmarks.eviction`: hit rates of the eviction policies on the conversation trace."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvcache.replay import Replayer, ReplayReport, WorkloadRequest, optimum, read_mooncake
from kvcache.replay.policies import parse_eviction, parse_host_eviction, parse_host_write

TRACE = Path(__file__).resolve().parents[2] / "shared/traces/mooncake_conversation.jsonl"
BLOCK_SIZE = 512  # tokens
CAPACITIES = (1_000, 3_000, 5_859, 10_000, 30_000, 50_000, 100_000)  # blocks of the device alone
POLICIES = (
    "lru",
    "last_access",
    "learned",
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
    ("learned", "learned"),
    ("learned", "lru"),
    ("s3_fifo", "lru"),
    ("segmented_lru:protected_share=0.2", "lru"),
    ("lru", "s3_fifo"),
    ("lru", "segmented_lru:protected_share=0.2"),
)
WRITES = ("back", "through", "selective:1", "selective:2")
GAINS = ("back", "learned:0", "learned:0.02", "learned:0.05", "learned:0.1", "learned:0.2")
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
accesses and priorities: use `learned`, `lru`, `s3_fifo` or `segmented_lru` there.

| policy | option | which cached block goes first |
|---|---|---|
| `lru` | | the least recently released |
| `last_access` | | the least recently accessed (`KVCacheManager.access`); among blocks without an \
access the least recently released; then the longest prefix |
| `learned` | `double_cost_tokens` (0: off), `tenant_share` (1: all) | what is least likely to be \
used again soon, by what was learned of blocks like it: [below](#the-policy-that-learns) |
| `priority` | `default_priority` (35) | the lowest priority that `free(..., retention=)` gave, until \
it expires; then the least recently released |
| `s3_fifo` | `small_share` (0.1) | in a small queue the oldest block without two hits, then in a \
large queue the oldest without a hit since its last turn |
| `segmented_lru` | `protected_share` (0.8) | blocks that were never hit; then the least recently \
released. At most that share of the pool is protected |

How to choose:

- `learned` for chats, agents and documents: requests that go on, that share a beginning, or that
  never come again. It needs no tuning. Below it is better than every other policy at every size; it
  was never more than 0.5 % worse than `lru`, on this trace and on 16 changed forms of it. With a
  host tier, take it for both (`host_eviction="learned"`): a device that keeps what is worth most
  leaves a host with `lru` the rest, and that pair can be worse than `lru` on both.
- `lru` where the cache holds all that comes again anyway, and where each nanosecond of the host
  counts: it costs least.
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

LEARNED = """\
`optimum` knows the future (Belady 1966): of the blocks, the one whose next use is farthest goes
first.

The changed forms: other speeds and think times, conversations in another order, requests that come
earlier or later, scans, a loop over documents, two services at once, half of the conversations,
changes of phase. `python -m benchmarks.trace_forms TRACE.jsonl` makes them and prints, for six
capacities, the hits of `learned` over those of `lru`: 0.995 at the lowest, 1.27 in the geometric
mean of 96.

## The policy that learns

`learned` counts when blocks are used again, and evicts what is worth least. All of it happens in
the calls that the manager makes anyway; there is nothing to train before, and nothing to set.

- **Segments.** The blocks that a request releases with `free` are one or two segments: the
  beginning that other conversations share, and its own blocks behind it.
- **Classes.** An own segment is of a class by the turn of the conversation (0, 1, 2, 3 and more),
  the tokens that this turn added (2,560 and more, 20,480 and more) and whether the answer has 64
  tokens or more; `free(request_class=...)` (0, 1, more) splits them once more, as far as the counts
  show that it matters. A shared one is of a class by how often its chain was seen to fork (1, 2, 4, 16
  and more times). The policy finds turns and forks by itself: a request whose tokens begin with a
  whole earlier request goes on with it, one that leaves an earlier one midway forks from it.
  `free(turn=...)` says the turn where the caller knows it; `num_output_tokens` the length of the
  answer, where its tokens were not appended to the request. Blocks that leave a running request
  (out of a window, after a swap) are of a class of their own.
- **Ages** are counted in tokens released, never by a clock: the same calls give the same evictions.
- **Learning.** A sample of blocks, chosen by hash, is remembered in a ring of 32,768 records,
  cached or not. What is used again is counted by class and age; what grows older unused is counted
  too. Counts fade.
- **Worth.** From the counts follows how likely a block of a class and age is used in each span of
  time to come. Its worth is the best ratio of hits expected to time kept, over all times to give it
  up (Gittins' index). Classes of which little is known are taken for all blocks together, and
  these, at first, for what is the less likely used the longer it was not.
- **Eviction.** Of the oldest and the youngest segment of each class, the one worth least goes
  first, deepest block first, as a whole. While the records do not reach back twice as far as the
  oldest segment, the oldest goes first, as `lru` has it.
- **Shares.** With `tenant_share=S`, the blocks of one salt (`Request.cache_salt`) that are more than
  the share S of the pool go first while others need room, those of the tenant that has most. Requests
  without a salt have no share. The host has none.
- **Priorities** of `free(..., retention=)` bound all this: a lower one goes first, until it ends,
  and worth decides among equal ones. Blocks without a priority have 35.
- `double_cost_tokens=N` weighs hits by what they save: a block behind a prefix of N tokens counts
  twice.

What it has learned can outlive the process: `manager.stats.learned.save(file)`, and in the next one
`manager.learn_from(LearnedReuse.load(file))`. A file that is missing, damaged or of another version
is ignored, with a warning. It holds counts, by class and age, and nothing of any request.

What it costs: 29 bytes per block and 1 MB, and time in each call (`make bench` prints both beside
`lru`).

What it may not do: it decides nothing but the order among blocks that no request holds, that are
not pinned, and through which nothing cached is found. It never holds a block back from a request
that needs one, and no content depends on it.

What others can do to it: the policy learns from all tenants together. A tenant that sends many
requests which never come again fills the cache with any policy; here it also teaches that first
turns are not continued, and the first turns of others go earlier. One that repeats its own requests
quickly makes its blocks worth more. What a tenant sees of it is what timing tells anyway: whether
its own blocks are still there. `tenant_share` bounds what a tenant can push out. Which hashes are
sampled is the same in each process, and can be found out; a request of nothing but sampled blocks
counts as much as several.

What was tried and left out:

- ARC, LIRS, and LFU with dynamic ageing. In the study that this policy comes from they had 65,300,
  60,757 and 64,650 hit blocks at 10,000 blocks, where `learned` has 68,187, and each had 10 to 35 %
  fewer than `lru` somewhere. They are not cheap either: ARC and LIRS remember as many blocks again as
  are cached.
- Ages by a clock, beside those in tokens. On this trace the hits were between 1.0 % fewer and 2.0 %
  more, with no rule in it. Ages in tokens do not change with the speed of the machine, and the same
  calls give the same evictions.
"""

HOST = """\
## With a host tier

The same, all hits counted, those on the host too. Blocks are written to the host when they are evicted
from the device (`host_write="back"`), and stay there when they are loaded.

`learned` on both tiers is one policy with two pools. A page on the host is of the class and the time
of release of the block that it is a copy of. What was loaded is on both tiers, so its page goes
first; it is written again when the device evicts it.
"""

HOST_WRITES = """\
## When to write to the host

`lru` on both, {host:,} blocks on the host. Hits that `selective` counts are hits on the device: where
that is small, few blocks live there long enough to be hit, and hardly anything is written.
"""

HOST_GAINS = """\
With `host_write="learned"` a block is written when it is evicted from the device, if at least
`min_gain_to_write` hits (0.05) are expected of it on the host, less the hits that its page is worth
to the blocks that are there: the best over all times to give it up again. What was loaded keeps its
page, as that saves writing it again. `learned` on both tiers; in the last column, blocks written for
each block that was hit on the host:
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
    best = {"optimum": [optimum(requests, BLOCK_SIZE, size) for size in CAPACITIES]}
    yield rate_table(
        ("policy",), {(name,): each for name, each in (rates | best).items()}, CAPACITIES
    )
    yield "".join(compared(name, each, rates["lru"]) for name, each in rates.items())
    yield LEARNED
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
            (device, WRITES_TO, mode): replayed(requests, device, "lru", WRITES_TO, host_write=mode)
            for device in DEVICE_CAPACITIES
            for mode in WRITES
        }
    )
    yield HOST_GAINS
    yield write_table(
        {
            (device, host, mode): replayed(requests, device, "learned", host, "learned", mode)
            for device, host in zip(DEVICE_CAPACITIES, HOST_CAPACITIES)
            for mode in GAINS
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
    block_size: int = BLOCK_SIZE,
) -> ReplayReport:
    """One request at a time; capacities without the null block."""
    name, options = parse_eviction(eviction)
    host_name, host_options = parse_host_eviction(host_eviction)
    replayer = Replayer(
        block_size=block_size,
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


def write_table(reports: dict[tuple[int, int, str], ReplayReport]) -> str:
    rows = [
        [
            f"{device:,}",
            f"{host:,}",
            mode,
            f"{report.token_hit_rate:.4f}",
            f"{report.host_hit_tokens:,}",
            f"{report.written_blocks:,}",
            f"{report.loaded_blocks:,}",
            f"{report.written_blocks * BLOCK_SIZE / max(report.host_hit_tokens, BLOCK_SIZE):.2f}",
        ]
        for (device, host, mode), report in reports.items()
    ]
    heads = ["device blocks", "host blocks", "write", "token hit rate", "host tokens hit"]
    heads += ["written", "loaded", "written per hit"]
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
