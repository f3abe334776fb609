# SPDX-License-Identifier: Apache-2.0
"""The command `kvcache plan`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvcache.cli.errors import OutputError, UsageError, quoted
from kvcache.cli.output import say, show, writing
from kvcache.cli.parts import Command, part
from kvcache_exchange.cli.modules import import_module, require_module
from kvcache_exchange.cli.parsing import MAX_INT32, MAX_INT64, number, plot_file
from kvcache_exchange.cli.progress import progress_bars
from kvcache_lab.cli import replay_options as options
from kvcache_lab.cli.replay import check_trace, read_workload, write_plot

if TYPE_CHECKING:
    from kvcache_lab import WorkloadRequest
    from kvcache_lab.fleet import FleetPlan, FleetReport, Hardware

_ROUTERS = ("round_robin", "least_loaded", "session", "prefix")


def add_plan_options(sub: argparse.ArgumentParser) -> None:
    """Add TRACE and all options. Each option validates its value."""
    sub.add_argument(
        "trace", nargs="?", metavar="TRACE", help="timed trace; default: generated chats"
    )
    sub.add_argument(
        "--format", metavar="FORM", help="trace format; default: detected from the first lines"
    )
    for option, least, most, default, text in (
        ("--limit", 1, MAX_INT32, None, "replay at most N requests"),
        ("--block-size", 1, MAX_INT32, None, options.BLOCK_SIZE_HELP),
        ("--num-blocks", 2, MAX_INT32, 10_001, "blocks per replica, including the null block"),
        ("--concurrency", 1, MAX_INT32, 256, "running requests per replica; default 256"),
        ("--most-replicas", 1, MAX_INT32, 1024, "maximum fleet size to search; default 1024"),
        ("--seed", 0, MAX_INT64, None, "seed of the generated chats; default 0"),
        ("--requests", 1, MAX_INT32, None, "number of chat turns; default 500"),
    ):
        sub.add_argument(
            option, metavar="N", type=number(option, least, most), default=default, help=text
        )
    for option, least, text in (
        ("--replicas", 1, "numbers of replicas to simulate; default: search for the fewest"),
        ("--host-blocks", 0, "sizes of each replica's host tier to simulate; default 0, none"),
        ("--store-blocks", 0, "sizes of the shared store to simulate; default 0, none"),
    ):
        sub.add_argument(option, metavar="N,N", type=_numbers(option, least), help=text)
    sub.add_argument(
        "--model",
        metavar="NAME|PATH",
        help="cache groups and bytes per block of a model: a config.json or its folder (no weights are "
        "loaded), or the name of a tiny model; default: one group, bytes_per_token of --hardware",
    )
    sub.add_argument(
        "--peers",
        metavar="no,yes",
        type=_peers,
        help="whether replicas load prefixes that other replicas have cached; default no",
    )
    sub.add_argument(
        "--decode-replicas",
        metavar="N,N",
        type=_decode_replicas,
        help="numbers of replicas that generate answers, while --replicas compute prompts; auto: "
        "search for the fewest; 0: all replicas do both; default 0",
    )
    sub.add_argument(
        "--router",
        metavar="R,R",
        type=_routers,
        default=_ROUTERS,
        help=f"routers to simulate, of {', '.join(_ROUTERS)}; default: all",
    )
    sub.add_argument("--eviction", metavar="P", default="lru", help="eviction policy; default lru")
    sub.add_argument(
        "--p99",
        metavar="MS",
        type=_milliseconds,
        default=1000.0,
        help="required time to first token at the 99th percentile; default 1000 ms",
    )
    sub.add_argument(
        "--hardware",
        metavar="FILE.json",
        help="speeds of a replica; default: example speeds",
    )
    sub.add_argument(
        "--write-hardware", metavar="FILE.json", help="write an example for --hardware, and exit"
    )
    sub.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    sub.add_argument(
        "--plot",
        metavar="FILE.png",
        type=plot_file,
        help="plot times to first token by number of replicas",
    )


def run_plan(args: argparse.Namespace) -> int:
    """Run `kvcache plan` and return the exit code: 1 if no fleet can be recommended."""
    if args.write_hardware is not None:
        return _write_hardware(args.write_hardware)
    check_trace(args)
    if args.format is not None and args.trace is None:
        raise UsageError(f"--format is {quoted(args.format)}: expected only with TRACE")
    if args.plot is not None:
        require_module("matplotlib", "--plot", "pip install 'torch-kvcache[cli]'")
    fleets = import_module("kvcache_lab.fleet")
    replay = import_module("kvcache_lab")
    args.block_size = args.block_size or options.default_block_size(args.trace, args.format)
    hardware = _hardware(args.hardware)
    groups = {} if args.model is None else _groups(args.model, args.block_size)
    name, workload = read_workload(args)
    if args.trace is not None and not os.path.isfile(args.trace):
        requests = list(workload)  # read a pipe only once

        def read() -> Iterable[WorkloadRequest]:
            return requests
    else:

        def read() -> Iterable[WorkloadRequest]:
            return read_workload(args)[1]

    try:
        with _progress(args) as on_report:
            plan = fleets.plan_fleet(
                read,
                fleets.Fleet(
                    replicas=1,
                    num_blocks=args.num_blocks,
                    block_size=args.block_size,
                    concurrency=args.concurrency,
                    eviction=args.eviction,
                    **groups,
                ),
                p99_ms=args.p99,
                routers=args.router,
                host_blocks=args.host_blocks,
                store_blocks=args.store_blocks,
                peers=args.peers,
                replicas=args.replicas,
                decode_replicas=args.decode_replicas,
                most_replicas=args.most_replicas,
                hardware=hardware,
                on_report=on_report,
            )
    except replay.TraceError as error:
        raise UsageError(str(error)) from None
    except MemoryError as error:
        raise UsageError(
            f"{name}: the fleets do not fit into memory ({error}): expected fewer blocks or replicas"
        ) from None
    except ValueError as error:
        raise UsageError(f"{name}: {error}") from None
    if args.plot is not None:
        write_plot(args.plot, lambda plots: plots.draw_fleet_plan(plan, name, args.plot))
    if args.json:
        with writing():
            print(json.dumps(plan.to_dict()))
    else:
        show(fleets.fleet_plan_table(plan))
        if plan.recommended is not None:
            show(_recommendation(plan))
    if plan.recommended is None:
        say(f"no fleet is recommended: {plan.reason}")
        return 1
    return 0


def _recommendation(plan: FleetPlan) -> str:
    report = plan.recommended
    fleet = report.fleet
    size = import_module("kvcache_lab.fleet.sizes").fleet_size(fleet)
    parts = [f"{size} with the router {fleet['router']}"]
    if fleet["host_blocks"]:
        parts.append(f"{fleet['host_blocks']:,} blocks on each host")
    if fleet["store_blocks"]:
        parts.append(f"a store of {fleet['store_blocks']:,} blocks")
    if fleet["peers"]:
        parts.append("loads from peers")
    return f"Choose {', '.join(parts)}."


@contextmanager
def _progress(args: argparse.Namespace) -> Iterator[Callable[[FleetReport], None] | None]:
    """Show the number of simulated fleets on a terminal, and yield a function to call after each."""
    if args.json or not sys.stderr.isatty():
        yield None
        return
    with progress_bars() as bar:
        task = bar.add_task("fleets", total=None, state="")

        fleet_size = import_module("kvcache_lab.fleet.sizes").fleet_size

        def advance(report: FleetReport) -> None:
            state = f"{fleet_size(report.fleet)}, {report.fleet['router']}"
            bar.update(task, advance=1, state=state)

        yield advance


def _hardware(path: str | None) -> Hardware | None:
    if path is None:
        return None
    fleets = import_module("kvcache_lab.fleet")
    try:
        return fleets.read_hardware(path)
    except fleets.HardwareError as error:
        raise UsageError(f"--hardware: {error}") from None
    except OSError as error:
        raise UsageError(
            f"--hardware is {quoted(path)}: expected a readable file ({error.strerror})"
        ) from None


def _groups(name: str, block_size: int) -> dict[str, str | int]:
    """Return a model's groups and the size of their blocks in bytes, as arguments of `Fleet`."""
    from kvcache import plan_cache
    from kvcache_lab.groups import groups_text

    load_layers = part("model_layers", "--model")
    layers, longest = load_layers(name, "--model", block_size)
    try:
        plan = plan_cache(layers, MAX_INT64, max_model_len=longest)
    except ValueError as error:
        raise UsageError(f"--model is {quoted(name)}: {error}") from None
    return {"groups": groups_text(plan.groups), "page_bytes": plan.page_bytes}


def _write_hardware(path: str) -> int:
    from kvcache_lab.fleet.hardware import example_hardware

    if os.path.exists(path):
        raise UsageError(f"--write-hardware is {quoted(path)}: expected a file that does not exist")
    try:
        with open(path, "w") as file:
            file.write(example_hardware())
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}") from None
    return 0


def _numbers(option: str, least: int) -> Callable[[str], tuple[int, ...]]:
    convert = number(option, least, MAX_INT32)
    return lambda text: tuple(map(convert, text.split(",")))


def _decode_replicas(text: str) -> tuple[int | None, ...]:
    convert = number("--decode-replicas", 0, MAX_INT32)
    return tuple(None if each == "auto" else convert(each) for each in text.split(","))


def _peers(text: str) -> tuple[bool, ...]:
    names = text.split(",")
    if not {*names} <= {"no", "yes"}:
        raise UsageError(f"--peers is {quoted(text)}: expected no, yes or no,yes")
    return tuple(name == "yes" for name in names)


def _routers(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in _ROUTERS:
            raise UsageError(
                f"--router has {quoted(name)}: expected names of {', '.join(_ROUTERS)}"
            )
    return names


def _milliseconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise UsageError(f"--p99 is {quoted(text)}: expected more than 0 milliseconds")
    return value


COMMAND = Command(
    "replay a trace through fleets of several sizes, and recommend the smallest sufficient one",
    run_plan,
    add_plan_options,
)
