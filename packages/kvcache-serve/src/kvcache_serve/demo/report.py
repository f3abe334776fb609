# SPDX-License-Identifier: Apache-2.0
"""The results of the demo, and functions that format them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from kvcache.checks import instance, plain_fields, shown
from kvcache_serve.demo.chats import Chat

if TYPE_CHECKING:
    from rich.table import Table
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class DemoReport:
    """Counts and times of a demo, and the results of the comparison with a dense cache."""

    model: str
    requests: int
    sequences: int
    identical_sequences: int  # sequences whose tokens equal those of the model's own dense cache
    agreeing_tokens: int  # tokens before the first difference, summed over all sequences
    kv_cache_dtype: str | None  # None: the model's dtype
    prompt_tokens: int
    cached_prompt_tokens: int
    generated_tokens: int
    steps: int
    seconds: float
    # Part of `seconds` spent on scheduling, tables and swaps, excluding writes and reads of K and V.
    kvcache_seconds: float
    pool_bytes: int
    host_bytes: int
    dense_bytes: int  # a dense cache for the same concurrent sequences at their final lengths
    swapped_out_sequences: int
    recomputed_sequences: int
    swapped_out_pages: int
    swapped_in_pages: int
    copied_pages: int
    forked_sequences: int
    evicted_blocks: int
    dense_seconds: float  # time of the model with its own cache, one sequence at a time

    def __post_init__(self) -> None:
        plain_fields(self)

    @property
    def hit_rate(self) -> float:
        """Fraction of the prompt tokens that were cache hits."""
        return self.cached_prompt_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, object]:
        """Return all results for JSON."""
        return asdict(self) | {
            "hit_rate": self.hit_rate,
            "tokens_per_second": self.tokens_per_second,
        }


def report_table(report: DemoReport) -> Table:
    """Return the results as a rich table."""
    instance(report, DemoReport, "report")
    from rich.table import Table

    table = Table(title=f"Chats served by {report.model}", show_header=False)
    table.add_column("figure")
    table.add_column("value", justify="right", style="cyan")
    table.add_column("note")
    for section in _sections(report):
        for row in section:
            table.add_row(*row)
        table.add_section()
    return table


def summary(report: DemoReport) -> str:
    """Return the result as one sentence."""
    instance(report, DemoReport, "report")
    same = f"{report.identical_sequences:,} of {report.sequences:,} sequences"
    if report.kv_cache_dtype is None:
        return f"identical to a dense cache: {same}"
    share = report.agreeing_tokens / report.generated_tokens if report.generated_tokens else 1.0
    return (
        f"KV in {report.kv_cache_dtype}, compared with a dense cache: {same} identical; {share:.0%} of "
        "the tokens before the first difference"
    )


def transcript(chat: Chat, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a chat as text: each question, its first answer, and the dense cache's answer if it
    differs.
    """
    instance(chat, Chat, "chat")
    if not callable(getattr(tokenizer, "decode", None)):
        raise TypeError(f"tokenizer is {shown(tokenizer)}: expected one of transformers")
    lines = []
    for question, turn in zip(chat.questions, chat.turns):
        answer = tokenizer.decode(turn.answers[0], skip_special_tokens=True).strip()
        hits = f"{turn.num_cached_tokens} of {len(turn.prompt)} prompt tokens were prefix hits"
        lines += [f"user:  {question}", f"model: {answer}", f"       ({hits})"]
        if turn.dense_answers and turn.dense_answers[0] != turn.answers[0]:
            dense = tokenizer.decode(turn.dense_answers[0], skip_special_tokens=True).strip()
            lines.append(f"dense: {dense}")
    return "\n".join(lines)


def _sections(report: DemoReport) -> list[list[tuple[str, str, str]]]:
    share = report.kvcache_seconds / report.seconds if report.seconds else 0.0
    times = report.dense_bytes / report.pool_bytes if report.pool_bytes else 0.0
    return [
        [
            ("requests", f"{report.requests:,}", f"{report.sequences:,} sequences"),
            ("generated tokens", f"{report.generated_tokens:,}", f"in {report.steps:,} steps"),
            ("tokens/s", f"{report.tokens_per_second:,.0f}", f"{report.seconds:.1f} seconds"),
            ("share of kvcache", f"{share:.1%}", "of the time: plans, tables, slots, swaps"),
        ],
        [
            ("prompt tokens", f"{report.prompt_tokens:,}", ""),
            ("prefix-hit rate", f"{report.hit_rate:.1%}", "reused instead of computed"),
            (
                "evicted blocks",
                f"{report.evicted_blocks:,}",
                "cached blocks, reused for other content",
            ),
        ],
        [
            (
                "preemptions",
                f"{report.swapped_out_sequences + report.recomputed_sequences:,}",
                f"{report.swapped_out_sequences:,} by swap, "
                f"{report.recomputed_sequences:,} by recompute",
            ),
            ("pages out, in", f"{report.swapped_out_pages:,}, {report.swapped_in_pages:,}", "host"),
            ("forks", f"{report.forked_sequences:,}", f"{report.copied_pages:,} pages copied"),
        ],
        [
            ("pool", _mib(report.pool_bytes), f"and {_mib(report.host_bytes)} on the host"),
            (
                "dense cache",
                _mib(report.dense_bytes),
                f"for as many chats: {times:.1f} times",
            ),
        ],
    ]


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.2f} MiB"
