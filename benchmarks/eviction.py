# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.eviction`: hit rates of eviction policies on two traces.

One trace contains conversations, and the other contains requests of coding agents.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvcache_exchange.cli.policy_text import parse_eviction, parse_host_eviction, parse_host_write
from kvcache_lab import Replayer, ReplayReport, WorkloadRequest, optimum, read_mooncake

TRACE = Path(__file__).resolve().parents[2] / "shared/traces/mooncake_conversation.jsonl"
AGENTS = TRACE.with_name("agents_claude_code.jsonl.gz")
BLOCK_SIZE = 512  # tokens
CAPACITIES = (1_000, 3_000, 5_859, 10_000, 30_000, 50_000, 100_000)  # blocks, without a host tier
POLICIES = ("lru", "last_access", "learned", "priority")
AGENT_CAPACITIES = (500, 1_000, 2_000, 3_000, 6_000, 10_000)
AGENT_POLICIES = ("lru", "learned")
DEVICE_CAPACITIES, HOST_CAPACITIES = (1_000, 10_000), (10_000, 30_000, 100_000)
PAIRS = (  # policies of the device and of the host
    ("lru", "lru"),
    ("learned", "learned"),
    ("learned", "lru"),
)
WRITES = ("back", "through")
GAINS = ("back", "back:0", "back:0.02", "back:0.05", "back:0.1", "back:0.2")
WRITES_TO = 30_000


def main() -> int:
    def of_trace(name: str) -> Callable[[dict[str, list[WorkloadRequest]]], str]:
        return lambda traces: TABLES[name](traces.get(name, traces["others"]))

    return print_tables("eviction", __doc__, {name: of_trace(name) for name in TABLES}, read)


def print_tables(
    module: str, text: str, tables: Mapping[str, Callable], load: Callable[[Path], object]
) -> int:
    """Print the tables named on the command line, and write them to a page if requested.

    `load` reads a trace. Each table is created by a function that accepts the loaded traces as a
    dict with the keys "agents" and "others".
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}", description=text)
    parser.add_argument("--trace", type=Path, default=TRACE, help="JSONL file in Mooncake's format")
    parser.add_argument(
        "--agents", type=Path, default=AGENTS, help="trace of coding agents in the same format"
    )
    parser.add_argument("--only", nargs="*", choices=tables, help="names of tables; default: all")
    parser.add_argument(
        "--write",
        type=Path,
        metavar="FILE",
        help="replace the tables in this page, each between <!-- table: NAME --> and <!-- end -->",
    )
    args = parser.parse_args()
    for name in ("trace", "agents"):
        if not getattr(args, name).is_file():
            parser.error(f"--{name} is {str(getattr(args, name))!r}: expected an existing file")
    traces = {"agents": load(args.agents), "others": load(args.trace)}
    for name in args.only or tables:
        table = tables[name](traces)
        print(f"{name}\n\n{table}", flush=True)
        if args.write:
            args.write.write_text(with_table(args.write.read_text(), name, table))
    return 0


def read(trace: Path) -> list[WorkloadRequest]:
    no_content = np.empty(0, np.int64)  # token contents are needed only for verification
    return [replace(each, content=no_content) for each in read_mooncake(trace)]


def with_table(page: str, name: str, table: str) -> str:
    """Return the page's text with this table replaced."""
    first, last = f"<!-- table: {name} -->\n", "<!-- end -->\n"
    before, found, rest = page.partition(first)
    if not found:
        raise SystemExit(f"the page has no {first.strip()}")
    return f"{before}{first}\n{table}\n{last}{rest.partition(last)[2]}"


def device_table(requests: list[WorkloadRequest]) -> str:
    rates = rates_of(requests, POLICIES, CAPACITIES)
    table = rate_table(("policy",), rates, CAPACITIES)
    base = rates["lru",]
    return table + "\n" + "".join(compared(name, each, base) for (name,), each in rates.items())


def agents_table(requests: list[WorkloadRequest]) -> str:
    return rate_table(
        ("policy",), rates_of(requests, AGENT_POLICIES, AGENT_CAPACITIES), AGENT_CAPACITIES
    )


def rates_of(
    requests: list[WorkloadRequest], policies: Sequence[str], capacities: Sequence[int]
) -> dict[tuple[str, ...], list[float]]:
    """Return the token hit rates of each policy and of the optimum."""
    rates = {
        (policy,): [replayed(requests, size, policy).token_hit_rate for size in capacities]
        for policy in policies
    }
    for name, holds in (("optimum with running requests", True), ("optimum", False)):
        rates[name,] = [
            optimum(requests, BLOCK_SIZE, size, holds_running=holds) for size in capacities
        ]
    return rates


def host_table(requests: list[WorkloadRequest]) -> str:
    return rate_table(
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


def writes_table(requests: list[WorkloadRequest]) -> str:
    return write_table(
        {
            (device, WRITES_TO, mode): replayed(requests, device, "lru", WRITES_TO, host_write=mode)
            for device in DEVICE_CAPACITIES
            for mode in WRITES
        }
    )


def gains_table(requests: list[WorkloadRequest]) -> str:
    return write_table(
        {
            (device, host, mode): replayed(requests, device, "learned", host, "learned", mode)
            for device, host in zip(DEVICE_CAPACITIES, HOST_CAPACITIES)
            for mode in GAINS
        }
    )


TABLES = {
    "device": device_table,
    "agents": agents_table,
    "host": host_table,
    "writes": writes_table,
    "gains": gains_table,
}


def replayed(
    requests: Sequence[WorkloadRequest],
    capacity: int,
    eviction: str,
    host_capacity: int = 0,
    host_eviction: str = "lru",
    host_write: str = "back",
    block_size: int = BLOCK_SIZE,
) -> ReplayReport:
    """Replay requests one at a time. Capacities exclude the null block."""
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
    """Return a line that lists the sizes at which a policy is better than, worse than, or equal to
    LRU.
    """
    if rates is lru or name.startswith("optimum"):
        return ""
    gains = [round(rate, 4) - round(base, 4) for rate, base in zip(rates, lru)]
    found = []
    for what, is_so in (
        ("better than `lru`", lambda gain: gain > 0),
        ("worse than `lru`", lambda gain: gain < 0),
        ("identical to `lru`", lambda gain: gain == 0),
    ):
        sizes = [f"{size:,}" for size, gain in zip(CAPACITIES, gains) if is_so(gain)]
        if sizes:
            where = "every size"
            if len(sizes) < len(gains):
                *most, last = sizes
                where = f"{', '.join(most)} and {last} blocks" if most else f"{last} blocks"
            found.append(f"{what} at {where}")
    return f"- `{name}`: {'; '.join(found)}.\n"


def markdown(rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
