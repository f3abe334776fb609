"""The command `kvcache`: replay a workload, a demo, and a look at the installation.

Exit codes: 0; 1 when verification found wrong KV, something is missing or the output cannot be
written; 2 for wrong usage or a malformed trace; 130 when interrupted or when nobody reads the output
any more.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import io
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

# Heavy modules are imported where they are used: --help and --json stay quick, and nothing but
# --verify needs torch.
if TYPE_CHECKING:
    from kvcache.replay import ReplayReport, Series, WorkloadRequest

_MAX_INT32 = 2**31 - 1
_MAX_INT64 = 2**63 - 1
_NUM_SHOWN_MISMATCHES = 10
_INTERRUPTED = 130
# Defaults: a pool that holds part of the workload, so that hits and evictions both show.
_TRACE_BLOCK_SIZE, _TRACE_NUM_BLOCKS = 512, 10_001
_CHAT_BLOCK_SIZE, _CHAT_NUM_BLOCKS, _CHAT_REQUESTS = 16, 1_025, 500
_DEMO = ["--requests", "4000", "--concurrency", "4", "--verify"]


class UsageError(Exception):
    """What was asked for cannot be; one line that says what was expected. Exit code 2."""


class OutputError(Exception):
    """Standard output does not take what was found; one line. Exit code 1."""


class MissingError(Exception):
    """Something is not installed; one line that says how to get it. Exit code 1."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line (default: the process's) and returns the exit code."""
    if sys.stderr is None:  # closed by whoever started us: what is said there is lost
        sys.stderr = io.StringIO()
    try:
        if sys.stdout is None:
            raise OutputError("standard output is closed: expected it open, /dev/null at least")
        code = _run(sys.argv[1:] if argv is None else list(argv))
        with _writing():
            sys.stdout.flush()  # so that a closed pipe or a full disk is noticed here, not at exit
        return code
    except UsageError as error:
        return _complain(error, 2)
    except (MissingError, OutputError) as error:
        return _complain(error, 1)
    except (KeyboardInterrupt, SystemExit):  # rich turns a broken pipe into SystemExit
        return _INTERRUPTED
    except BrokenPipeError:
        return _INTERRUPTED


@contextmanager
def _writing() -> Iterator[None]:
    """Around what writes to standard output; a full disk becomes an OutputError."""
    try:
        yield
    except OSError as error:
        # What is still buffered goes nowhere: the flush at exit must not complain about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise OutputError(f"standard output cannot be written: {error.strerror}") from None


def _run(argv: list[str]) -> int:
    parser = _parser()
    try:
        args, unknown = parser.parse_known_args(argv)
    except SystemExit as stop:  # --help
        return int(stop.code or 0)
    if unknown:
        raise UsageError(
            f"{_shown(unknown[0])} is unknown: expected an option that `kvcache {args.name} --help` lists"
        )
    return args.command(args)


def _complain(error: Exception, code: int) -> int:
    _say(" ".join(str(error).split()))
    return code


def _say(message: str) -> None:
    """One line on stderr; where that cannot be written, the exit code has to do."""
    with suppress(OSError):
        print(f"kvcache: {message}", file=sys.stderr)


def _shown(text: str) -> str:
    """A value of the command line for an error: quoted, and shortened where it is endless."""
    return repr(text if len(text) <= 40 else text[:37] + "...")


# --- the command line -----------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise UsageError(f"{message.removeprefix('argument ')} (see `{self.prog} --help`)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("kvcache", description="The KV-cache layer of an LLM engine, at work.")
    commands = parser.add_subparsers(dest="name", metavar="COMMAND", required=True)
    _add_replay(commands)
    for name, command, text in (
        ("demo", _demo, "replay generated chats with verification, in about ten seconds"),
        ("doctor", _doctor, "show what is installed and which native libraries are in use"),
    ):
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.set_defaults(command=command)
    return parser


def _add_replay(commands: argparse._SubParsersAction) -> None:
    text = "replay a Mooncake trace, or generated chats, against the prefix cache"
    sub = commands.add_parser("replay", help=text, description=text, allow_abbrev=False)
    sub.set_defaults(command=_replay)
    sub.add_argument("trace", nargs="?", metavar="TRACE", help="JSONL file; default: chats")
    block_size = f"tokens; default {_TRACE_BLOCK_SIZE}, for chats {_CHAT_BLOCK_SIZE}"
    num_blocks = f"null block counted; default {_TRACE_NUM_BLOCKS}, for chats {_CHAT_NUM_BLOCKS}"
    for option, least, most, text in (
        ("--block-size", 1, _MAX_INT32, block_size),
        ("--num-blocks", 2, _MAX_INT32, num_blocks),
        ("--limit", 1, _MAX_INT32, "replay at most N requests"),
        ("--concurrency", 1, _MAX_INT32, "requests that run at a time; default 1"),
        ("--seed", 0, _MAX_INT64, "of the chats; default 0"),
        ("--requests", 1, _MAX_INT32, f"number of chat turns; default {_CHAT_REQUESTS}"),
    ):
        sub.add_argument(option, metavar="N", type=_number(option, least, most), help=text)
    sub.add_argument(
        "--device", default="cpu", type=_device_name, help="where --verify keeps KV; default cpu"
    )
    for option, text in (
        ("--verify", "write, read back and compare real KV (needs torch)"),
        ("--json", "one JSON object on stdout instead of a table"),
    ):
        sub.add_argument(option, action="store_true", help=text)
    sub.add_argument(
        "--plot", metavar="FILE.png", type=_plot_file, help="draw the course of the replay"
    )


def _number(option: str, least: int, most: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise UsageError(
                f"{option} is {_shown(text)}: expected a whole number from {least} to {most}"
            )
        return value

    return convert


def _plot_file(text: str) -> str:
    # os.path, not pathlib: a name too long for the system is then no folder, and no exception.
    folder = os.path.dirname(text) or "."
    if os.path.splitext(text)[1].lower() != ".png":
        raise UsageError(f"--plot is {text!r}: expected a file name that ends in .png")
    if not os.path.isdir(folder):
        raise UsageError(f"--plot is {text!r}: expected an existing folder, not {folder!r}")
    if os.path.isdir(text):
        raise UsageError(f"--plot is {text!r}: expected a file, not a directory")
    return text


def _device_name(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise UsageError(f"--device is {_shown(text)}: expected cpu, cuda or cuda:N")
    return text


# --- replay ---------------------------------------------------------------------------------------


def _replay(args: argparse.Namespace) -> int:
    _check_trace(args)
    _require(args)
    report, series = _replayed(args)
    if args.plot is not None:
        _plot(series, report, args.plot)
    if args.json:
        with _writing():
            print(json.dumps(report.to_dict()))
    else:
        _print_table(report)
    return _judged(report)


def _demo(_: argparse.Namespace) -> int:
    args = _parser().parse_args(["replay", *_DEMO])
    _require(args)
    report, _ = _replayed(args)
    _print_table(report)
    if not report.mismatches:
        _print(_what_was_shown(report))
    return _judged(report)


def _what_was_shown(report: ReplayReport) -> str:
    return (
        f"Shown: {report.requests:,} turns of interleaved chats went through a cache of "
        f"{report.capacity_blocks:,} blocks; {report.token_hit_rate:.0%} of their prompt tokens "
        "were found there instead of being computed again, "
        f"{report.evicted_blocks:,} blocks were evicted on the way, "
        f"and each of the {report.verified_tokens:,} tokens, read back through block "
        "table and slot mapping and once more from its block itself, had exactly its own K and V."
    )


def _check_trace(args: argparse.Namespace) -> None:
    # After parsing: a mistyped option's value would be taken for the trace.
    if args.trace is not None:
        if not os.path.exists(args.trace):
            raise UsageError(f"TRACE is {args.trace!r}: expected an existing file")
        if os.path.isdir(args.trace):
            raise UsageError(f"TRACE is {args.trace!r}: expected a file, not a directory")
        for option, value in (("--seed", args.seed), ("--requests", args.requests)):
            if value is not None:
                raise UsageError(
                    f"{option} is {value}: expected only without TRACE, it is for generated chats"
                )


def _require(args: argparse.Namespace) -> None:
    """Complains about what is not there before the work begins, not after it."""
    if not args.json:
        _require_module("rich", "tables (--json works without it)", "pip install 'kvcache[cli]'")
    if args.plot is not None:
        _require_module("matplotlib", "--plot", "pip install 'kvcache[cli]'")
    if args.verify:
        _require_module("torch", "--verify", "pip install torch")
    if args.device != "cpu":
        _require_module("torch", f"--device {args.device}", "pip install torch")
        _check_cuda(args.device)


def _require_module(module: str, purpose: str, remedy: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise MissingError(f"{module} is not installed, which {purpose} needs: {remedy}")


def _check_cuda(device: str) -> None:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise UsageError(
            f"--device is {device!r}: expected cpu, torch {torch.__version__} finds no CUDA device"
        )
    index = int(device.partition(":")[2] or 0)
    if index >= count:
        raise UsageError(f"--device is {device!r}: expected at most cuda:{count - 1}")


def _replayed(args: argparse.Namespace) -> tuple[ReplayReport, Series | None]:
    replay = _import("kvcache.replay")
    is_trace = args.trace is not None
    block_size = args.block_size or (_TRACE_BLOCK_SIZE if is_trace else _CHAT_BLOCK_SIZE)
    num_blocks = args.num_blocks or (_TRACE_NUM_BLOCKS if is_trace else _CHAT_NUM_BLOCKS)
    concurrency = min(args.concurrency or 1, num_blocks - 1)  # each request holds a block at least
    series = replay.Series() if args.plot is not None else None
    try:
        replayer = replay.Replayer(
            block_size=block_size,
            num_blocks=num_blocks,
            concurrency=concurrency,
            verifier=_verifier(args, block_size, num_blocks, concurrency),
            series=series,
        )
    except MemoryError as error:
        raise UsageError(
            f"--num-blocks is {num_blocks}: expected fewer, they do not fit into memory ({error})"
        ) from None
    name, workload = _workload(args)
    try:
        with _progress(args) as advance:
            report = replayer.run(workload, name, advance)
    except replay.TraceError as error:
        raise UsageError(str(error)) from None
    return report, series


def _import(name: str) -> ModuleType:
    """Imports what needs the native libraries, which may have to be built first."""
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise MissingError(f"{name} cannot be used: {reason} (see `kvcache doctor`)") from error


def _verifier(args: argparse.Namespace, block_size: int, num_blocks: int, concurrency: int):
    if not args.verify:
        return None
    verifier = _import("kvcache.replay.verifier")
    try:
        return verifier.KVVerifier(
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_reqs=concurrency,
            device=args.device,
        )
    except MemoryError as error:
        raise UsageError(
            f"--block-size {block_size} with --num-blocks {num_blocks} and --concurrency "
            f"{concurrency} is too much to verify: {error}"
        ) from None


def _workload(args: argparse.Namespace) -> tuple[str, Iterable[WorkloadRequest]]:
    from kvcache.replay import chat_workload

    if args.trace is not None:
        return Path(args.trace).name, itertools.islice(_trace(args.trace), args.limit)
    seed = args.seed or 0
    requests = chat_workload(args.requests or _CHAT_REQUESTS, seed)
    return f"chat (seed {seed})", itertools.islice(requests, args.limit)


def _trace(path: str) -> Iterator[WorkloadRequest]:
    from kvcache.replay import read_mooncake

    try:
        yield from read_mooncake(path)
    except OSError as error:
        raise UsageError(
            f"TRACE is {path!r}: expected a readable file ({error.strerror})"
        ) from None


@contextmanager
def _progress(args: argparse.Namespace) -> Iterator[Callable[[], None] | None]:
    """A progress bar on stderr where somebody watches; yields what to call after each request."""
    if args.json or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("requests", total=_num_expected(args))
        yield lambda: progress.advance(task)


def _num_expected(args: argparse.Namespace) -> int | None:
    """Requests to come; None where counting would consume them (a pipe)."""
    if args.trace is None:
        num_requests = args.requests or _CHAT_REQUESTS
    elif os.path.isfile(args.trace):
        with open(args.trace, "rb") as file:
            num_requests = sum(not line.isspace() for line in file)
    else:
        return args.limit
    return num_requests if args.limit is None else min(num_requests, args.limit)


def _print_table(report: ReplayReport) -> None:
    from kvcache.replay.report import report_table

    _print(report_table(report))


def _print(what: object) -> None:
    from rich.console import Console

    with _writing():
        Console(highlight=False).print(what)


def _plot(series: Series, report: ReplayReport, path: str) -> None:
    from kvcache.replay.plots import draw

    try:
        draw(series, report, path)
    except OSError as error:
        raise UsageError(
            f"--plot is {path!r}: expected a writable file ({error.strerror})"
        ) from None


def _judged(report: ReplayReport) -> int:
    """Names the wrong KV that was found; the exit code."""
    found = report.mismatched_requests or []
    for mismatch in found[:_NUM_SHOWN_MISMATCHES]:
        _say(str(mismatch))
    if len(found) > _NUM_SHOWN_MISMATCHES:
        more = len(found) - _NUM_SHOWN_MISMATCHES
        _say(f"wrong KV in {more} more requests")
    return 1 if found else 0


def _doctor(_: argparse.Namespace) -> int:
    from kvcache import doctor

    rows = doctor.diagnosis()
    if importlib.util.find_spec("rich") is None:
        with _writing():
            for name, found, _ in rows:
                print(f"{name:16} {found}")
    else:
        _print(doctor.table(rows))
    return 0 if all(ok for _, _, ok in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
