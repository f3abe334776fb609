# SPDX-License-Identifier: Apache-2.0
"""The `kvcache` command: doctor, and the subcommands of other packages (`parts`).

Exit codes: 0 for success; 1 if a check fails (wrong KV, differing answers, a component that
`doctor` rejects), a requirement is missing, or the output cannot be written; 2 for incorrect usage,
or an empty or malformed trace; 130 after an interrupt or a broken pipe.
"""

# In all files of this package, slow imports are deferred to first use. This keeps --help and --json
# fast, and only commands that run computations need torch.
from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from kvcache import __version__
from kvcache.cli import parts
from kvcache.cli.errors import MissingError, OutputError, UsageError, quoted
from kvcache.cli.output import say, show, writing
from kvcache.cli.parts import Command

_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (default: the process's arguments) and return the exit code."""
    if sys.stderr is None:  # the parent process has closed stderr, so messages are lost
        sys.stderr = io.StringIO()
    try:
        if sys.stdout is None:
            raise OutputError("standard output is closed: expected it open, /dev/null at least")
        code = _run(sys.argv[1:] if argv is None else list(argv))
        with writing():
            sys.stdout.flush()  # detect a closed pipe or a full disk here, not at exit
        return code
    except UsageError as error:
        return _complain(error, 2)
    except (MissingError, OutputError) as error:
        return _complain(error, 1)
    except (KeyboardInterrupt, SystemExit):  # rich raises SystemExit on a broken pipe
        return _INTERRUPTED
    except BrokenPipeError:
        return _INTERRUPTED


def _run(argv: list[str]) -> int:
    if argv:
        parts.require_command(argv[0])
    parser = _parser()
    try:
        args, unknown = parser.parse_known_args(argv)
    except SystemExit as stop:  # raised for --help and --version
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
    parser = _Parser("kvcache", description="Command-line tools for the kvcache library.")
    parser.add_argument("--version", action="version", version=f"kvcache {__version__}")
    commands = parser.add_subparsers(dest="name", metavar="COMMAND", required=True)
    found = {
        **parts.commands(),
        "doctor": Command(
            "show installed packages, native libraries and devices", _doctor, add_doctor_options
        ),
    }
    for name, command in found.items():
        sub = commands.add_parser(
            name, help=command.text, description=command.text, allow_abbrev=False
        )
        sub.set_defaults(command=command.run)
        command.add_options(sub)
    return parser


def add_doctor_options(sub: argparse.ArgumentParser) -> None:
    """Add the options of `kvcache doctor`."""
    sub.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    sub.add_argument(
        "--vllm",
        nargs=argparse.REMAINDER,
        metavar="MODEL [OPTION ...]",
        help="check whether vLLM can serve this model (or a folder with a config.json) with kvcache's "
        "scheduler; takes the options of vllm serve",
    )


def _doctor(options: argparse.Namespace) -> int:
    from kvcache.cli import doctor

    rows = doctor.diagnosis() if options.vllm is None else doctor.of_vllm(options.vllm)
    is_ok = all(ok for _, _, ok in rows)
    if options.json:
        with writing():
            found = [{"what": name, "found": text, "ok": ok} for name, text, ok in rows]
            print(json.dumps({"ok": is_ok, "rows": found}))
    elif find_spec("rich") is None:  # rich is not installed, as one of the rows reports
        print("\n".join(f"{name}: {text}" for name, text, _ in rows))
    else:
        show(doctor.table(rows))
    return 0 if is_ok else 1
