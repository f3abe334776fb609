# SPDX-License-Identifier: Apache-2.0
"""The `kvcache demo` command."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvcache.cli.errors import UsageError, quoted
from kvcache.cli.models import load_model
from kvcache.cli.modules import require_module
from kvcache.cli.output import show, writing
from kvcache.cli.parsing import MAX_INT64, number, plot_file
from kvcache.cli.replay import run_replay_demo

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache.engine import Engine

_USERS, _TURNS = 16, 4


def add_demo_options(sub: argparse.ArgumentParser) -> None:
    """Add the options of `kvcache demo`, each with a check of its value."""
    sub.add_argument(
        "--model",
        metavar="NAME",
        default="llama",
        help="name of a tiny model (llama, qwen3, gemma3, deepseek_v3, bamba, qwen3_next, ...) or "
        "checkpoint folder; default llama",
    )
    for option, least, most, text in (
        ("--users", 1, 1_000, f"number of concurrent chats; default {_USERS}"),
        ("--turns", 1, 100, f"messages per chat; default {_TURNS}"),
        ("--seed", 0, MAX_INT64, "seed of the generated chats; default 0"),
    ):
        sub.add_argument(option, metavar="N", type=number(option, least, most), help=text)
    sub.add_argument(
        "--plot",
        metavar="FILE.png",
        type=plot_file,
        help="plot pool usage, hits and swaps over the steps",
    )
    sub.add_argument("--json", action="store_true", help="print the results as JSON")
    sub.add_argument(
        "--replay",
        action="store_true",
        help="replay generated chats with verification, without a model",
    )


def run_demo(args: argparse.Namespace) -> int:
    """Run `kvcache demo` and return the exit code."""
    if args.replay:
        given = ("users", "turns", "seed", "plot")
        others = [f"--{name}" for name in given if getattr(args, name) is not None]
        others += ["--json"] if args.json else []
        if others:
            raise UsageError(f"{others[0]} is given with --replay: expected one of them")
        return run_replay_demo()
    if not args.json:
        require_module(
            "rich", "tables (--json works without it)", "pip install 'torch-kvcache[cli]'"
        )
    if args.plot is not None:
        require_module("matplotlib", "--plot", "pip install 'torch-kvcache[cli]'")
    require_module("torch", "a model", "pip install torch")
    remedy = "pip install 'torch-kvcache[transformers]' (`kvcache demo --replay` does without it)"
    require_module("transformers", "a model", remedy)
    return _serve(args)


def _serve(args: argparse.Namespace) -> int:
    from kvcache import demo

    model = load_model(args.model, "--model")
    users, turns = args.users or _USERS, args.turns or _TURNS
    course = None if args.plot is None else demo.Course()
    with _progress(users * turns, args.json) as (on_step, on_compared):
        try:
            report = demo.serve_chats(
                model,
                args.model,
                num_users=users,
                num_turns=turns,
                seed=args.seed or 0,
                course=course,
                on_step=on_step,
                on_compared=on_compared,
            )
        except ValueError as error:
            raise UsageError(f"--model is {quoted(args.model)}: {error}") from None
    if course is not None:
        from kvcache.demo import plot

        try:
            plot.draw(course, report, args.plot)
        except OSError as error:
            raise UsageError(
                f"--plot is {args.plot!r}: expected a writable file ({error.strerror})"
            ) from None
    if args.json:
        with writing():
            print(json.dumps(report.to_dict()))
    else:
        show(demo.report_table(report))
        show(demo.summary(report))
    return 0 if report.identical_sequences == report.sequences else 1


@contextmanager
def _progress(
    num_turns: int, is_quiet: bool
) -> Iterator[tuple[Callable[[Engine, int], None] | None, Callable[[], None] | None]]:
    """Show two progress bars on stderr: turns served, with the state of the pool, and turns compared."""
    if is_quiet:
        yield None, None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        *Progress.get_default_columns(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[state]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        served = bar.add_task("turns served", total=num_turns, state="")
        compared = bar.add_task("compared with a dense cache", total=num_turns, state="")

        def on_step(engine: Engine, num_ended: int) -> None:
            pool, metrics = engine.cache.manager.pool, engine.metrics
            state = (
                f"pool {1 - pool.num_free / pool.num_total:.0%} held, "
                f"{metrics.swapped_out_pages:,} pages out, {metrics.swapped_in_pages:,} back"
            )
            bar.update(served, advance=num_ended, state=state)

        yield on_step, lambda: bar.advance(compared)
