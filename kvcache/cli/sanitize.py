# SPDX-License-Identifier: Apache-2.0
"""`kvcache sanitize`: replays a record that the KV cache sanitizer has written."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from kvcache.cli.errors import UsageError, quoted
from kvcache.cli.output import say, show, writing

if TYPE_CHECKING:
    from kvcache.sanitizer import Sanitizer

_MAX_SHOWN = 5


def add_sanitize_options(sub: argparse.ArgumentParser) -> None:
    """Add the options of `kvcache sanitize`."""
    sub.add_argument("record", metavar="RECORD", help="file written by Sanitizer(record=...)")
    sub.add_argument("--all", action="store_true", help=f"print all reports, not {_MAX_SHOWN}")
    sub.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run_sanitize(args: argparse.Namespace) -> int:
    """Run `kvcache sanitize` and return the exit code."""
    from kvcache.sanitizer import RecordError, replay_record

    try:
        sanitizer, error = replay_record(args.record, log=lambda report: None), None
    except OSError as failure:
        raise UsageError(f"{quoted(args.record)} cannot be read: {failure.strerror}") from None
    except (RecordError, ValueError) as failure:
        sanitizer, error = getattr(failure, "sanitizer", None), failure
        if sanitizer is None or not sanitizer.reports:
            raise UsageError(f"{quoted(args.record)}: {failure}") from None
    if args.json:
        reports = [asdict(report) for report in sanitizer.reports]
        with writing():
            print(json.dumps({"counts": sanitizer.counts, "reports": reports}))
    else:
        _print(sanitizer, args.all)
    if error is not None:
        say(f"{quoted(args.record)}: {error}")
        return 2
    return 1 if sanitizer.num_reports else 0


def _print(sanitizer: Sanitizer, prints_all: bool) -> None:
    from rich.table import Table

    table = Table(title=f"KV cache sanitizer, {sanitizer.step} steps")
    table.add_column("finding")
    table.add_column("number", justify="right")
    for kind, count in sanitizer.counts.most_common():
        table.add_row(kind, f"{count:,}")
    table.add_row("slots written", f"{sanitizer.slots_written:,}")
    table.add_row("slots read", f"{sanitizer.slots_read:,}")
    table.add_row("compared", f"{sanitizer.slots_compared:,}")
    for report in sanitizer.reports[: None if prints_all else _MAX_SHOWN]:
        with writing():
            print(f"{report}\n")
    show(table)
