# SPDX-License-Identifier: Apache-2.0
"""Serves chats with a tiny model, and compares every answer with that of `generate`."""

import io

import pytest

# Skip the file before it imports modules that need transformers.
pytest.importorskip("transformers")

from kvcache_serve.cli.models import load_model
from kvcache_serve.demo import (
    Course,
    make_chats,
    make_text_chats,
    report_table,
    serve_chats,
    transcript,
)
from kvcache_serve.engine.output_processor import OutputProcessor
from kvcache_serve.engine.transformers.tiny_models import tiny_model_names
from tests.machinery.dense_models import VOCAB_SIZE, dense
from tests.machinery.tokenizers import chat_tokenizer

END = 2  # </s>


def served(name="llama", num_users=4, num_turns=2, max_tokens=200, **options):
    chats = make_chats(num_users, num_turns, max_tokens, VOCAB_SIZE, seed=0)
    return serve_chats(dense(name), name, chats, **options)


@pytest.mark.slow
def test_every_answer_is_compared_although_the_pool_is_too_small():
    course = Course()
    report = served(course=course)
    assert report.requests == 8 and report.sequences == report.identical_sequences == 12
    assert report.agreeing_tokens == report.generated_tokens
    assert report.hit_rate > 0.3 and report.swapped_out_sequences and report.forked_sequences == 4
    assert report.pool_bytes < report.dense_bytes
    lengths = {len(getattr(course, name)) for name in ("held", "held_cached", "cached", "swapped")}
    assert lengths == {report.steps}
    held = [sum(each) for each in zip(course.held, course.held_cached, course.cached)]
    assert max(held) <= course.num_blocks and course.held[-1] == 0


@pytest.mark.slow
def test_wrong_answers_are_counted(monkeypatch):
    extend = OutputProcessor._extend

    def wrong(self, sample, logits, at, best, are_finite):
        picks = [511 - token for token in best]
        return extend(self, sample, logits.flip(-1), at, picks, are_finite)

    monkeypatch.setattr(OutputProcessor, "_extend", wrong)
    report = served(num_users=2, num_turns=1)
    assert report.identical_sequences < report.sequences
    assert report.agreeing_tokens < report.generated_tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(tiny_model_names()))
def test_every_offered_model_matches_generate(name):
    chats = make_chats(4, 1, 48, VOCAB_SIZE, seed=0)
    report = serve_chats(load_model(name, "--model"), name, chats)
    assert report.identical_sequences == report.sequences == 6


@pytest.mark.slow
def test_text_chats_end_at_end_tokens_and_are_shown():
    tokenizer, model = chat_tokenizer(), dense("llama")
    chats = make_text_chats(tokenizer, 4, 2, max_tokens=12, stop_token_ids=(END,))
    report = serve_chats(model, "llama", chats)
    assert report.identical_sequences == report.sequences == 12
    shown = transcript(chats[0], tokenizer)
    assert "user:  What is the capital of France?" in shown and "dense:" not in shown
    second = chats[0].turns[1]
    assert second.num_cached_tokens > 0
    assert f"({second.num_cached_tokens} of {len(second.prompt)} prompt tokens were" in shown
    chats[0].turns[1] = second._replace(dense_answers=([5],))
    assert "dense: " in transcript(chats[0], tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize("width", [40, 60, 80])
def test_the_table_fits_narrow_terminals(width):
    from rich.console import Console

    console = Console(width=width, record=True, file=io.StringIO())
    console.print(report_table(served(num_turns=1)))
    text = console.export_text()
    assert "…" not in text and max(map(len, text.splitlines())) <= width
