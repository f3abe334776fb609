# SPDX-License-Identifier: Apache-2.0
"""The commands `kvcache replay` and `kvcache demo --replay`."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from kvcache.cli.errors import OutputError, UsageError, quoted
from kvcache.cli.output import say, show, writing
from kvcache.cli.parts import Command
from kvcache_exchange.cli.modules import check_cuda, import_module, require_module
from kvcache_exchange.cli.policies import policy_options
from kvcache_exchange.cli.progress import progress
from kvcache_lab.cli import replay_options as options

if TYPE_CHECKING:
    from kvcache_lab import ReplayReport, Series, Service, WorkloadRequest
    from kvcache_lab.verifier import KVVerifier

_NUM_SHOWN_MISMATCHES = 10
_MOST_RECORDED = 2**18  # in larger pools, --why records only a sample of the evictions
_DEMO = ["--requests", "4000", "--concurrency", "4", "--verify"]


def run_replay(args: argparse.Namespace) -> int:
    """Run `kvcache replay` and return the exit code."""
    check_trace(args)
    _import_files(args)
    _resolve(args)
    _require(args)
    if args.compare is not None:
        return _compare(args)
    report, series = _replayed(args)
    if args.plot is not None:
        _plot(series, report, args.plot)
    if args.json:
        with writing():
            print(json.dumps(report.to_dict()))
    else:
        _print_table(report)
    return _exit_code(report)


def run_replay_demo() -> int:
    """Run `kvcache demo --replay` and return the exit code."""
    parser = argparse.ArgumentParser()
    options.add_replay_options(parser)
    args = parser.parse_args(_DEMO)
    _resolve(args)
    _require(args)
    report, _ = _replayed(args)
    _print_table(report)
    if not report.mismatches:
        show(_summary(report))
    return _exit_code(report)


def _summary(report: ReplayReport) -> str:
    return (
        f"Shown: {report.requests:,} turns of interleaved chats ran through a cache of "
        f"{report.capacity_blocks:,} blocks. {report.token_hit_rate:.0%} of their prompt tokens "
        f"were cache hits, and {report.evicted_blocks:,} blocks were evicted. Each of the "
        f"{report.verified_tokens:,} tokens was read back twice, through block table and slot "
        "mapping and directly from its block, and had exactly its own K and V."
    )


def check_trace(args: argparse.Namespace) -> None:
    # Check TRACE only after parsing, because argparse would mistake the value of a mistyped option
    # for TRACE.
    if args.trace is not None:
        if not os.path.exists(args.trace):
            raise UsageError(f"TRACE is {args.trace!r}: expected an existing file")
        if os.path.isdir(args.trace):
            raise UsageError(f"TRACE is {args.trace!r}: expected a file, not a directory")
        for option, value in (("--seed", args.seed), ("--requests", args.requests)):
            if value is not None:
                raise UsageError(
                    f"{option} is {value}: expected only without TRACE, because it is for generated chats"
                )


def _import_files(args: argparse.Namespace) -> None:
    """Run the files given with --import, each once per process. Raise UsageError if a file
    fails.
    """
    for path in args.imports or ():
        if not (path.endswith(".py") and os.path.isfile(path)):
            raise UsageError(f"--import is {quoted(path)}: expected an existing file, FILE.py")
        # Imported first, so that its errors are not attributed to the file.
        import_module("kvcache.kinds")
        name = f"kvcache_import:{os.path.realpath(path)}"
        if name in sys.modules:
            continue
        spec = importlib.util.spec_from_file_location(name, path)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[name]
            raise UsageError(
                f"--import is {quoted(path)}: expected a file that can be imported, but importing "
                f"it raised {_error_text(error, path)}"
            ) from error


def _error_text(error: BaseException, path: str) -> str:
    """Return an error's type and message, and the last line of the file in its traceback."""
    lines = [f"{type(error).__name__}: {error}"]
    frames = traceback.extract_tb(error.__traceback__)
    lines += [f"line {frame.lineno}" for frame in reversed(frames) if frame.filename == path][:1]
    return ", ".join(lines)


def _require(args: argparse.Namespace) -> None:
    """Raise MissingError if a required module is missing. Called before any work begins."""
    if args.plot is not None:
        require_module("matplotlib", "--plot", "pip install 'torch-kvcache[cli]'")
    if args.verify:
        require_module("torch", "--verify", "pip install torch")
    if args.device != "cpu":
        require_module("torch", f"--device {args.device}", "pip install torch")
        check_cuda(args.device)


def _resolve(args: argparse.Namespace) -> None:
    """Set defaults, and parse groups and policies. Raise UsageError for conflicting options."""
    is_trace = args.trace is not None
    args.block_size = args.block_size or options.default_block_size(args.trace, args.format)
    default = options.TRACE_NUM_BLOCKS if is_trace else options.CHAT_NUM_BLOCKS
    args.num_blocks = args.num_blocks or default
    # Each request holds at least one block.
    default = 1 if args.timed is None else options.TIMED_CONCURRENCY
    args.concurrency = min(args.concurrency or default, args.num_blocks - 1)
    args.service = _service(args)
    if args.format is not None:
        forms = import_module("kvcache_lab").trace_forms()
        if not is_trace:
            raise UsageError(f"--format is {quoted(args.format)}: expected only with TRACE")
        if args.format not in forms:
            raise UsageError(
                f"--format is {quoted(args.format)}: expected one of {', '.join(forms)}"
            )
    args.specs = None
    if args.groups is not None:
        try:
            args.specs = import_module("kvcache_lab.groups").parse_groups(
                args.groups, args.block_size
            )
        except ValueError as error:
            raise UsageError(f"--groups has {error}") from None
    _check_comparison(args)
    if args.host_blocks == 1:
        raise UsageError(
            "--host-blocks is 1: expected 2 or more (one is the null block), or 0 for no host tier"
        )
    if args.store_blocks and args.verify:
        raise UsageError(
            f"--store-blocks is {args.store_blocks} with --verify: expected only one of the two, because "
            "the store is simulated without content"
        )
    if args.kv_format is not None:
        formats = import_module("kvcache.formats").format_names()
        if not args.verify:
            raise UsageError(
                f"--kv-format is {quoted(args.kv_format)}: expected only with --verify"
            )
        if args.kv_format not in formats:
            raise UsageError(
                f"--kv-format is {quoted(args.kv_format)}: expected one of {', '.join(formats)}"
            )
    args.policies = policy_options(args, "--host-blocks")
    args.policies["num_host_blocks"] = args.host_blocks or 0
    if args.why:
        num_blocks = args.num_blocks + args.policies["num_host_blocks"]
        args.policies["explain_misses"] = max(num_blocks // _MOST_RECORDED, 1)
    if args.hash_block_size is not None:
        sizes = [spec.block_size for spec in args.specs or ()] or [args.block_size]
        if math.gcd(*sizes) % args.hash_block_size:
            raise UsageError(
                f"--hash-block-size is {args.hash_block_size}: expected a divisor of every group's "
                f"block size, so of {math.gcd(*sizes)}"
            )


def _service(args: argparse.Namespace) -> Service | None:
    if args.timed is None:
        return None
    service = import_module("kvcache_lab").Service
    try:
        return service.parse(args.timed) if args.timed else service()
    except ValueError as error:
        raise UsageError(f"--timed is {quoted(args.timed)}: {error}") from None


def _check_comparison(args: argparse.Namespace) -> None:
    if args.compare is None:
        if args.sizes is not None:
            raise UsageError(
                "--sizes is given without --compare: expected both, or use --num-blocks"
            )
        return
    for option, value in (
        ("--eviction", args.eviction),
        ("--verify", args.verify),
        ("--store-blocks", args.store_blocks),
        ("--why", args.why),
    ):
        if value:
            raise UsageError(f"{option} is given with --compare: expected only one of the two")
    policies = import_module("kvcache_exchange.cli.policy_text")
    args.compared = args.compare.split(",") if args.compare else None
    for text in args.compared or ():
        try:
            policies.parse_eviction(text)
        except ValueError as error:
            raise UsageError(f"--compare has {error}") from None
    capacity = args.num_blocks - 1
    wanted = args.sizes or tuple(capacity * n // 8 + 1 for n in (1, 2, 4, 8, 16, 32))
    args.sizes = tuple(sorted({max(size, 2) - 1 for size in wanted}))
    args.concurrency = min(args.concurrency, args.sizes[0])


def _replayed(args: argparse.Namespace) -> tuple[ReplayReport, Series | None]:
    replay = import_module("kvcache_lab")
    series = replay.Series() if args.plot is not None else None
    verifier = _verifier(args)
    try:
        replayer = replay.Replayer(
            **_groups(args),
            **args.policies,
            num_blocks=args.num_blocks,
            hash_block_size=args.hash_block_size,
            chunk_tokens=args.chunk_tokens,
            concurrency=args.concurrency,
            service=args.service,
            verifier=verifier,
            num_store_blocks=args.store_blocks or 0,
            series=series,
        )
    except MemoryError as error:
        raise UsageError(
            f"--num-blocks is {args.num_blocks}{_and_host(args)}: expected fewer, because this many do "
            f"not fit into memory ({error})"
        ) from None
    except ValueError as error:  # the least common multiple of the block sizes is too large
        raise UsageError(f"--groups is {quoted(args.groups)}: {error}") from None
    name, workload = read_workload(args)
    try:
        with _trace_errors(name), _progress(args) as advance:
            report = replayer.run(workload, name, advance)
    except import_module("kvcache.kinds").KindError as error:
        raise UsageError(f"--groups is {quoted(args.groups)}: {error}") from None
    return report, series


def _compare(args: argparse.Namespace) -> int:
    """Run `kvcache replay --compare` and return the exit code."""
    replay = import_module("kvcache_lab")
    policies = args.compared or replay.COMPARED
    name, workload = read_workload(args)
    try:
        with _trace_errors(name):
            requests = list(workload)
            with _progress(args, len(requests) * len(policies) * len(args.sizes)) as advance:
                found = replay.compare(
                    requests,
                    policies,
                    args.sizes,
                    trace=name,
                    with_optimum=args.specs is None
                    and args.hash_block_size is None
                    and args.service is None,
                    on_request=advance,
                    **_groups(args),
                    **args.policies,
                    hash_block_size=args.hash_block_size,
                    chunk_tokens=args.chunk_tokens,
                    concurrency=args.concurrency,
                    service=args.service,
                )
    except MemoryError as error:
        raise UsageError(
            f"--sizes has {args.sizes[-1] + 1}: expected fewer, because this many do not fit into memory "
            f"({error})"
        ) from None
    if args.plot is not None:
        write_plot(args.plot, lambda plots: plots.draw_comparison(found, args.plot))
    if args.json:
        with writing():
            print(json.dumps(found.to_dict()))
    else:
        show(replay.comparison_table(found))
        show(f"Choose {found.choice}.")
    return 0


def _groups(args: argparse.Namespace) -> dict:
    """Return the groups as arguments of the replayer and the verifier."""
    return {"block_size": args.block_size} if args.specs is None else {"groups": args.specs}


def _and_host(args: argparse.Namespace) -> str:
    return f" and --host-blocks {args.host_blocks}" if args.host_blocks else ""


def _verifier(args: argparse.Namespace) -> KVVerifier | None:
    if not args.verify:
        return None
    verifier = import_module("kvcache_lab.verifier")
    try:
        return verifier.KVVerifier(
            **_groups(args),
            num_blocks=args.num_blocks,
            num_host_blocks=args.host_blocks or 0,
            max_num_reqs=args.concurrency,
            device=args.device,
            kv_format=args.kv_format,
        )
    except (MemoryError, ValueError) as error:  # pages or tables are too large
        given = f"--block-size {args.block_size}"
        if args.specs is not None:
            given = f"--groups {quoted(args.groups)}"
        raise UsageError(
            f"{given} with --num-blocks {args.num_blocks}{_and_host(args)} and --concurrency "
            f"{args.concurrency} is too much to verify: {error}"
        ) from None


def read_workload(args: argparse.Namespace) -> tuple[str, Iterable[WorkloadRequest]]:
    """Return the name and the requests of the workload."""
    from kvcache_lab import chat_workload

    if args.trace is not None:
        requests = _trace(args.trace, args.format)
        return Path(args.trace).name, itertools.islice(requests, args.limit)
    seed = args.seed or 0
    requests = chat_workload(args.requests or options.CHAT_REQUESTS, seed)
    return f"chat (seed {seed})", itertools.islice(requests, args.limit)


@contextmanager
def _trace_errors(name: str) -> Iterator[None]:
    """Report errors of the trace as UsageError."""
    try:
        yield
    except import_module("kvcache_lab").TraceError as error:
        raise UsageError(str(error)) from None
    except import_module("kvcache_lab.workload").ArrivalError as error:
        raise UsageError(f"{name}: {error}") from None


def _trace(path: str, form: str | None) -> Iterator[WorkloadRequest]:
    from kvcache_lab import read_trace

    is_empty = True
    try:
        for request in read_trace(path, form):
            is_empty = False
            yield request
    except OSError as error:
        raise UsageError(
            f"TRACE is {path!r}: expected a readable file ({error.strerror})"
        ) from None
    if is_empty:
        raise UsageError(f"TRACE is {path!r}: expected one request or more, the file has none")


def _progress(
    args: argparse.Namespace, total: int | None = None
) -> AbstractContextManager[Callable[[], None] | None]:
    """Show a progress bar on a terminal, and yield a function to call after each request."""
    if args.json or not sys.stderr.isatty():
        return nullcontext()
    return progress(_num_expected(args) if total is None else total)


def _num_expected(args: argparse.Namespace) -> int | None:
    """Return the number of requests. It is unknown for a pipe, whose requests would be consumed by
    counting, and for a compressed trace. In these cases, return `--limit`, or None without a limit.
    """
    traces = import_module("kvcache_lab.traces.registry")
    if args.trace is None:
        num_requests = args.requests or options.CHAT_REQUESTS
    elif os.path.isfile(args.trace) and not traces.is_compressed(args.trace):
        with open(args.trace, "rb") as file:
            num_requests = sum(not line.isspace() for line in file)
    else:
        return args.limit
    return num_requests if args.limit is None else min(num_requests, args.limit)


def _print_table(report: ReplayReport) -> None:
    from kvcache_lab.report import report_table

    show(report_table(report))


def _plot(series: Series, report: ReplayReport, path: str) -> None:
    write_plot(path, lambda plots: plots.draw(series, report, path))


def write_plot(path: str, draw: Callable[[ModuleType], None]) -> None:
    from kvcache_lab import plots

    try:
        draw(plots)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}") from None


def _exit_code(report: ReplayReport) -> int:
    """Report wrong KV, if any was found, and return the exit code."""
    found = report.mismatched_requests or []
    for mismatch in found[:_NUM_SHOWN_MISMATCHES]:
        say(str(mismatch))
    if len(found) > _NUM_SHOWN_MISMATCHES:
        more = len(found) - _NUM_SHOWN_MISMATCHES
        say(f"wrong KV in {more} more requests")
    return 1 if found else 0


COMMAND = Command(
    "replay a trace of requests, or generated chats, through the prefix cache",
    run_replay,
    options.add_replay_options,
)
