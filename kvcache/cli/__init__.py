"""The command `kvcache`: replay a workload, a demo, a server, measurements, a look at the installation.

Exit codes: 0; 1 when verification found wrong KV, something is missing or the output cannot be
written; 2 for wrong usage or a malformed trace; 130 when interrupted or when the output is
no longer read.
"""

# Heavy modules are imported where they are used, here and in the other files: --help and --json stay
# quick, and nothing but --verify and bench needs torch.
from __future__ import annotations

import argparse
import importlib.util
import io
import sys
from collections.abc import Sequence

from kvcache.cli.bench import add_bench_options, run_bench
from kvcache.cli.demo import add_demo_options, run_demo
from kvcache.cli.errors import MissingError, OutputError, UsageError, quoted
from kvcache.cli.output import say, show, writing
from kvcache.cli.parsing import add_replay_options
from kvcache.cli.replay import run_replay
from kvcache.cli.serve import add_serve_options, run_serve

_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line (default: the process's) and returns the exit code."""
    if sys.stderr is None:  # closed by the parent process: messages are lost
        sys.stderr = io.StringIO()
    try:
        if sys.stdout is None:
            raise OutputError("standard output is closed: expected it open, /dev/null at least")
        code = _run(sys.argv[1:] if argv is None else list(argv))
        with writing():
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


def _run(argv: list[str]) -> int:
    parser = _parser()
    try:
        args, unknown = parser.parse_known_args(argv)
    except SystemExit as stop:  # --help
        return int(stop.code or 0)
    if unknown:
        raise UsageError(
            f"{quoted(unknown[0])} is unknown: expected an option that `kvcache {args.name} --help` lists"
        )
    return args.command(args)


def _complain(error: Exception, code: int) -> int:
    say(" ".join(str(error).split()))
    return code


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise UsageError(f"{message.removeprefix('argument ')} (see `{self.prog} --help`)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("kvcache", description="The KV-cache layer of an LLM engine, at work.")
    commands = parser.add_subparsers(dest="name", metavar="COMMAND", required=True)
    for name, text, run, add_options in (
        (
            "replay",
            "replay a trace of requests, or generated chats, against the prefix cache",
            run_replay,
            add_replay_options,
        ),
        (
            "bench",
            "measure how fast pages move here, beside one contiguous copy",
            run_bench,
            add_bench_options,
        ),
        (
            "demo",
            "serve chats by a real model in a pool too small for them, compared with a dense cache",
            run_demo,
            add_demo_options,
        ),
        (
            "serve",
            "serve a model at OpenAI's endpoints, with a page that shows its cache; a reference",
            run_serve,
            add_serve_options,
        ),
        (
            "doctor",
            "show what is installed and which native libraries are in use",
            _doctor,
            lambda sub: None,
        ),
    ):
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.set_defaults(command=run)
        add_options(sub)
    return parser


def _doctor(_: argparse.Namespace) -> int:
    from kvcache.cli import doctor

    rows = doctor.diagnosis()
    if importlib.util.find_spec("rich") is None:
        with writing():
            for name, found, _ in rows:
                print(f"{name:16} {found}")
    else:
        show(doctor.table(rows))
    return 0 if all(ok for _, _, ok in rows) else 1
