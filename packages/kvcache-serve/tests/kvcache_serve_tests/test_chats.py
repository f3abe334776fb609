# SPDX-License-Identifier: Apache-2.0
"""The chats of the demo, which consist of random tokens or English text."""

import pytest

pytest.importorskip("transformers")

from kvcache_serve.demo import make_chats, make_text_chats, serve_chats
from tests.machinery.dense_models import dense
from tests.machinery.tokenizers import chat_tokenizer

END = 2  # </s>


def test_chats_stay_within_their_tokens():
    chats = make_chats(5, 3, 100, 512, seed=1)
    assert chats[0].history == chats[2].history != chats[1].history
    assert [chat.num_samples for chat in chats] == [1, 1, 1, 3, 1]
    for chat in chats:
        while not chat.is_over:
            chat.end_turn(chat.next_prompt(), [[1] * chat.max_tokens])
        assert len(chat.history) == chat.longest <= 100


def test_more_turns_than_tokens_are_rejected():
    with pytest.raises(
        ValueError, match="num_turns is 50: expected at most 43 with max_tokens 100"
    ):
        make_chats(1, 50, 100, 512, seed=0)


def test_text_chats_are_rendered_by_the_chat_template():
    tokenizer = chat_tokenizer()
    first, *_ = make_text_chats(tokenizer, 2, 2, max_tokens=9, stop_token_ids=(END,))
    assert first.questions[0] == "What is the capital of France?"
    answer = [*tokenizer.encode("Paris"), END]
    first.end_turn(first.next_prompt(), [answer])
    said = [
        {"role": "system", "content": "You are a helpful assistant. Answer in one short sentence."},
        {"role": "user", "content": first.questions[0]},
        {"role": "assistant", "content": "Paris"},
        {"role": "user", "content": first.questions[1]},
    ]
    expected = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(first.next_prompt()) == expected
    assert len(first.next_prompt()) + first.max_tokens <= first.longest


def test_text_chats_need_a_chat_template():
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="tokenizer has no chat template: expected one"):
        make_text_chats(tokenizer, 1, 1)


def test_empty_list_of_chats_is_rejected():
    with pytest.raises(ValueError, match="chats is empty: expected one or more"):
        serve_chats(dense("llama"), "llama", [])
