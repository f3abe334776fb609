# SPDX-License-Identifier: Apache-2.0
"""The demo. A tiny model serves chats, and every answer is checked."""

import json
import logging

import pytest

pytest.importorskip("transformers")  # skip before importing modules that need transformers

from kvcache.cli import main
from kvcache.cli.models import load_model
from kvcache.demo import Course, make_chats, serve_chats
from kvcache.demo.chats import answer_length
from kvcache.engine.output_processor import OutputProcessor
from kvcache.engine.transformers.tiny_models import tiny_model_names
from tests.machinery.dense_models import dense
from tests.machinery.shared import sampled

logging.getLogger("transformers").setLevel(logging.ERROR)
SMALL = {"num_users": 4, "num_turns": 2, "max_chat_tokens": 200}


def test_chats_stay_within_their_tokens():
    chats = make_chats(5, 3, 100, 512, seed=1)
    assert chats[0].history == chats[2].history != chats[1].history
    assert [chat.num_samples for chat in chats] == [1, 1, 1, 3, 1]
    for chat in chats:
        while not chat.is_over:
            chat.end_turn(chat.next_prompt(), [[1] * answer_length(3, 100)])
        assert len(chat.history) <= 100


def test_every_answer_is_compared_and_the_pool_is_too_small():
    course = Course()
    report = serve_chats(dense("llama"), "llama", course=course, **SMALL)
    assert report.requests == 8 and report.sequences == report.identical_sequences == 12
    assert report.hit_rate > 0.3 and report.swapped_out_sequences and report.forked_sequences == 4
    assert report.pool_bytes < report.dense_bytes
    lengths = {len(getattr(course, name)) for name in ("held", "held_cached", "cached", "swapped")}
    assert lengths == {report.steps}
    held = [sum(each) for each in zip(course.held, course.held_cached, course.cached)]
    assert max(held) <= course.num_blocks and course.held[-1] == 0


def test_a_wrong_answer_is_counted(monkeypatch):
    extend = OutputProcessor._extend

    def wrong(self, sample, logits, at, best):
        return extend(self, sample, logits.flip(-1), at, [511 - token for token in best])

    monkeypatch.setattr(OutputProcessor, "_extend", wrong)
    report = serve_chats(dense("llama"), "llama", **SMALL | {"num_users": 2, "num_turns": 1})
    assert report.identical_sequences < report.sequences


def test_the_command_prints_a_table_and_draws_a_picture(capsys, tmp_path):
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    path = tmp_path / "demo.png"
    assert main(["demo", "--users", "2", "--turns", "1", "--plot", str(path)]) == 0
    out = capsys.readouterr().out
    assert "identical to a dense cache: 2 of 2 sequences" in out and "prefix-hit rate" in out
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_command_prints_json(capsys):
    assert main(["demo", "--users", "1", "--turns", "1", "--model", "gemma3", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["identical_sequences"] == figures["sequences"] == 1
    assert figures["model"] == "gemma3" and figures["hit_rate"] >= 0


@pytest.mark.parametrize("name", sampled(sorted(tiny_model_names())))
def test_every_listed_model_matches_generate(name):
    model = load_model(name, "--model")
    report = serve_chats(model, name, num_users=2, num_turns=1, max_chat_tokens=90)
    assert report.identical_sequences == report.sequences == 2


def test_checkpoint_folder_is_served(capsys, tmp_path):
    dense("llama", 2).save_pretrained(tmp_path)
    assert main(["demo", "--users", "1", "--turns", "1", "--model", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["identical_sequences"] == 1


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("no/such", "--model is 'no/such': expected one of llama, qwen3"),
        (
            "tests",
            "--model is 'tests': expected the folder of a checkpoint that transformers loads",
        ),
    ],
)
def test_invalid_model_prints_one_line(capsys, model, says):
    assert main(["demo", "--model", model, "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and says in err


def test_turns_that_do_not_fit_print_one_line(capsys):
    assert main(["demo", "--turns", "100", "--users", "1", "--json"]) in (0, 2)
    err = capsys.readouterr().err
    assert err == "" or (err.startswith("kvcache: --") and err.count("\n") == 1)
