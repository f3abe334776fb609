# SPDX-License-Identifier: Apache-2.0
"""The same requests through OpenAI's client: whole, as a stream, and with the helper that joins a
stream. Tokenizers of several forms, with and without drafts. Each answer is compared with one decode of
its tokens.
"""

import codecs
import dataclasses
import random
import threading
import time
from contextlib import contextmanager

import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("openai", reason="openai is not installed: its clients are not tested")
pytest.importorskip("httpx")

import openai
from transformers.convert_slow_tokenizer import bytes_to_unicode

from kvcache import LayerSpec, build, plan_cache
from kvcache_serve.engine import Engine
from kvcache_serve.server import ByteTexts, EngineLoop, Limits, Server, TokenizerTexts, make_app
from kvcache_serve.server.texts import AnswerText
from tests.machinery.table_model import TableModel
from tests.machinery.tokenizers import chat_tokenizer, sentencepiece_tokenizer

SPACE = "\u2581"
WORDS = (*"abcdENDxyz.:", SPACE, "the", SPACE + "the", "Paris", SPACE + "Paris", "END", "é")
SPECIAL = ("<unk>", "<pad>", "<s>", "</s>")
MESSAGES = [{"role": "user", "content": "ab"}]
TOP = 4  # alternatives per token


class SentencePiece:
    """Byte fallback, and spaces in tokens. The decoder strips the first space of a text."""

    def __init__(self):
        tokenizer = sentencepiece_tokenizer(WORDS)
        self.texts, self.ids = TokenizerTexts(tokenizer), tokenizer.get_vocab()
        self.words = [self.ids[word] for word in WORDS]

    def data(self, name):
        if name.startswith("<0x"):
            return bytes([int(name[3:5], 16)])
        return name.replace(SPACE, " ").encode()

    def byte(self, value):
        return self.ids[f"<0x{value:02X}>"]


class ByteLevel:
    """Tokens of bytes, such as a space with the first byte of "é", and its second byte with "x"."""

    def __init__(self):
        words = ("Ġthe", "ĠÃ", "©x", "END")
        tokenizer = chat_tokenizer(words)
        self.texts, self.ids = TokenizerTexts(tokenizer), tokenizer.get_vocab()
        self.words = [self.ids[word] for word in (*words, *"abEND.Ġ")]
        self.characters = bytes_to_unicode()
        self.values = {character: value for value, character in self.characters.items()}

    def data(self, name):
        return bytes(self.values[character] for character in name)

    def byte(self, value):
        return self.ids[self.characters[value]]


class Bytes:
    """Without a tokenizer, each byte is a token."""

    def __init__(self):
        self.texts = ByteTexts([0])
        self.ids = {"</s>": 0} | {chr(i): i for i in range(1, 256)}
        self.words = list(b"abcEND. ")

    def data(self, name):
        return name.encode("latin1")

    def byte(self, value):
        return value


FORMS = {each.__name__: each() for each in (SentencePiece, ByteLevel, Bytes)}


class Scripted(TableModel):
    """A model that answers with `script` to a prompt of `start` tokens."""

    start, script = 0, ()

    def logits_after(self, tokens):
        logits = super().logits_after(tokens).clamp(max=4.0)
        at = len(tokens) - self.start
        if 0 <= at < len(self.script):
            logits[self.script[at]] = 5.0
        return logits


class Served:
    """A server with a scripted model, and a client. With drafts, most drafts are right."""

    def __init__(self, form, with_drafts, **replaced):
        self.form, self.names = form, {token: name for name, token in form.ids.items()}
        layers = [LayerSpec("a", "full_attention", 16, 1, 1, dtype="float32")]
        plan = plan_cache(layers, 2**16, max_model_len=128, max_num_batched_tokens=64)
        plan = dataclasses.replace(plan, **replaced)
        cache = build(plan, max_num_reqs=4, num_speculative_tokens=5)
        self.model = Scripted(cache, vocab_size=max(form.ids.values()) + 1)
        engine = Engine(self.model, drafter=self._draft if with_drafts else None)
        limits = Limits(grace_seconds=0.5)
        app = make_app(EngineLoop(engine), form.texts, "m", limits=limits)
        self.server = Server(app, port=0, log_level="error")

    def _draft(self, request):
        at = request.num_tokens - self.model.start
        drafts = list(self.model.script[at : at + 5])
        return [*drafts[:-1], 1] if at % 3 == 0 else drafts

    @contextmanager
    def running(self):
        thread = threading.Thread(target=self.server.run)
        thread.start()
        while not self.server.started:
            time.sleep(0.01)
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self.client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0
        )
        try:
            yield self
        finally:
            self.server.should_exit = True
            thread.join()

    def ask(self, is_chat, script, **asked):
        """Return a request for a scripted answer, and the tokens of its prompt."""
        texts = self.form.texts
        prompt = texts.encode_chat(MESSAGES) if is_chat else texts.encode("ab")
        self.model.start, self.model.script = len(prompt), script
        asked = {"model": "m", "temperature": 0, **asked}
        if not is_chat:
            return asked | {"prompt": prompt}, prompt
        if asked.pop("logprobs", None) is not None:
            asked |= {"logprobs": True, "top_logprobs": TOP}
        return asked | {"messages": MESSAGES}, prompt

    def wanted(self, script, max_tokens, stop):
        """Return the text, the finish reason, and the tokens of an answer with their characters."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text, pieces = "", []
        for token in script[:max_tokens]:
            name = self.names[token]
            data = b"" if name in SPECIAL else self.form.data(name)
            pieces.append(decoder.decode(data))
            text += pieces[-1]
            if stop and stop in text:
                return text[: text.index(stop)], "stop", pieces
            if name == "</s>":
                return text + decoder.decode(b"", True), "stop", pieces
        rest = decoder.decode(b"", True)
        pieces[-1] += rest
        text += rest
        if stop and stop in text:
            return text[: text.index(stop)], "stop", pieces
        return text, "length", pieces


@pytest.fixture(scope="module", params=[(f, d) for f in FORMS for d in (False, True)], ids=str)
def served(request):
    form, with_drafts = request.param
    with Served(FORMS[form], with_drafts).running() as running:
        yield running


def scripts(form, rng):
    """Yield (script, max_tokens, stop) for answers that end in different ways."""
    spelled = lambda text: [form.byte(each) for each in text.encode()]  # noqa: E731
    end = form.ids["</s>"]
    yield spelled("日本") + form.words[:2], 5, None  # ends inside the second character
    yield (
        [form.byte(0xE6), *spelled("a日"), form.byte(0xA9), *spelled("é")],
        10,
        None,
    )  # stray bytes
    yield [*spelled("é"), end, *spelled("x")], 9, None
    yield [end], 3, None  # an empty answer
    yield [*spelled(" x"), *spelled("日本xyz")], 20, "本"  # a stop string inside bytes
    yield [*spelled(" ENDab")], 6, " END"  # the stop string is the whole beginning
    yield [*spelled("abEN"), end], 9, "END"  # a beginning of the stop string is shown in the end
    yield [*spelled("ab"), *form.words, *spelled("ab")], 25, "END"
    for _ in range(4):
        script = []
        while len(script) < 24:
            kind = rng.random()
            if kind < 0.6:
                script.append(rng.choice(form.words))
            elif kind < 0.8:
                script += spelled(rng.choice("é日😀 \u200da"))
            elif kind < 0.97:
                script.append(form.byte(rng.randrange(1, 256)))
            else:
                script.append(end)
        yield script, rng.randint(1, 24), rng.choice([None, "a", "END", " ", "é", "the"])


def joined(pieces, is_chat):
    """Return text, reason and log probabilities of each choice of a stream, and the last usage."""
    texts, reasons, entries, usage, roles = {}, {}, {}, None, {}
    for piece in pieces:
        assert usage is None, "an event follows the usage"
        usage = piece.usage
        assert bool(piece.choices) != bool(usage)
        for choice in piece.choices:
            i = choice.index
            assert i not in reasons, "an event follows the finish reason"
            texts[i] = texts.get(i, "") + (choice.delta.content if is_chat else choice.text)
            if is_chat:
                roles.setdefault(i, []).append(choice.delta.role)
            if choice.logprobs is not None:
                entries.setdefault(i, []).extend(flat(choice.logprobs, is_chat))
            if choice.finish_reason is not None:
                reasons[i] = choice.finish_reason
    for each in roles.values():
        assert each == ["assistant"] + [None] * (len(each) - 1)
    return [(texts[i], reasons[i], entries.get(i)) for i in sorted(texts)], usage


def flat(logprobs, is_chat):
    """Return one tuple per token: name, log probability, {name: log probability} of the alternatives,
    and offset or bytes.
    """
    if not is_chat:
        fields = logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs
        return list(zip(*fields, logprobs.text_offset, strict=True))
    tops = [{top.token: top.logprob for top in each.top_logprobs} for each in logprobs.content]
    assert all(len(top) == TOP for top in tops), "two alternatives have the same name"
    return [
        (each.token, each.logprob, top, each.bytes) for each, top in zip(logprobs.content, tops)
    ]


def whole(answer, is_chat):
    choices = [
        (
            choice.message.content if is_chat else choice.text,
            choice.finish_reason,
            None if choice.logprobs is None else flat(choice.logprobs, is_chat),
        )
        for choice in answer.choices
    ]
    if is_chat:
        assert {choice.message.role for choice in answer.choices} == {"assistant"}
    return choices, answer.usage


def all_ways(served, is_chat, asked):
    """Return the choices and the usage of a request, which are equal in all forms of the client."""
    client = served.client
    create = (client.chat.completions if is_chat else client.completions).create
    found = whole(create(**asked), is_chat)
    options = {"stream_options": {"include_usage": True}}
    ways = [joined(create(stream=True, **options, **asked), is_chat)]
    if is_chat:
        with client.chat.completions.stream(**options, **asked) as stream:
            for _ in stream:
                pass
        try:
            completion = stream.get_final_completion()
        except openai.LengthFinishReasonError as error:  # raised for the finish reason "length"
            completion = error.completion
        ways.append(whole(completion, is_chat))
    for choices, usage in ways:
        assert choices == found[0]
        counts = [(each.prompt_tokens, each.completion_tokens) for each in (usage, found[1])]
        assert counts[0] == counts[1]
    return found


def check_logprobs(served, is_chat, entries, prompt, script, text, pieces):
    """Compare the log probabilities of an answer with the model's, and their texts with its text."""
    known = list(prompt)
    for (name, logprob, top, _), token, piece in zip(entries, script, pieces, strict=True):
        logprobs = served.model.logits_after(known).log_softmax(-1)
        assert logprob == pytest.approx(logprobs[token].item(), abs=1e-9)
        best = logprobs.topk(TOP).values.tolist()
        assert sorted(top.values(), reverse=True) == pytest.approx(best, abs=1e-9)
        assert top[name] == logprob and (is_chat or name == piece)
        known.append(token)
    if is_chat:
        data = b"".join(bytes(data or []) for *_, data in entries)
        assert data.decode(errors="replace").startswith(text)
        return
    assert "".join(pieces).startswith(text)
    starts = [len("".join(pieces[:i])) for i in range(len(pieces))]
    assert [offset for *_, offset in entries] == [min(start, len(text)) for start in starts]


@pytest.mark.slow
@pytest.mark.parametrize("is_chat", [False, True], ids=["completion", "chat"])
def test_answers_equal_one_decode_of_their_tokens_in_all_forms_of_the_client(served, is_chat):
    rng = random.Random(7)
    for i, (script, max_tokens, stop) in enumerate(scripts(served.form, rng)):
        max_tokens = min(max_tokens, len(script))
        text, reason, pieces = served.wanted(script, max_tokens, stop)
        logprobs, n = TOP if i % 4 else None, 1 + i % 2
        asked, prompt = served.ask(
            is_chat, script, max_tokens=max_tokens, stop=stop, logprobs=logprobs, n=n
        )
        choices, usage = all_ways(served, is_chat, asked)
        assert [choice[:2] for choice in choices] == [(text, reason)] * n, (
            script,
            max_tokens,
            stop,
        )
        assert usage.completion_tokens == n * len(pieces) and usage.prompt_tokens == len(prompt)
        for *_, entries in choices:
            assert (entries is None) == (logprobs is None)
            if entries:
                check_logprobs(
                    served, is_chat, entries, prompt, script[: len(pieces)], text, pieces
                )


@pytest.mark.parametrize("form", FORMS)
def test_answer_continues_the_text_of_its_prompt(form):
    texts, rng = FORMS[form].texts, random.Random(form)
    for _ in range(50):
        prompt = texts.encode("ab the a")
        tokens = [rng.choice(FORMS[form].words[:4]) for _ in range(6)]
        answer = AnswerText(texts, [], prompt)
        found = "".join(answer.add([token]) for token in tokens) + answer.end()
        whole = AnswerText(texts, [])
        start = len(whole.add(prompt))
        whole.add(tokens)
        whole.end()
        assert found == answer.text == whole.text[start:]


def test_alternatives_of_equal_text_have_different_names(served):
    """With byte fallback, "a" and the byte of "a" have the same text."""
    script = [served.form.byte(97), served.form.words[0]]
    for is_chat in (False, True):
        asked, _ = served.ask(is_chat, script, max_tokens=2, logprobs=TOP)
        choices, _ = all_ways(served, is_chat, asked)
        assert [len(top) for _, _, top, _ in choices[0][2]] == [TOP, TOP]


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_request_that_outgrows_the_pool_is_a_client_error(is_stream):
    """A plan reserves blocks for the longest request, so this happens only with a smaller pool."""
    form = FORMS["Bytes"]
    with Served(form, with_drafts=False, num_pages=3).running() as served:
        asked, _ = served.ask(False, [97] * 60, max_tokens=60)
        message = (
            "needs at least 3 blocks for 33 tokens: expected at most 2, all blocks of the pool"
        )
        with pytest.raises(openai.APIError, match=message) as told:
            for _ in served.client.completions.create(stream=is_stream, **asked):
                pass
        if not is_stream:
            assert told.value.status_code == 400
        asked, _ = served.ask(False, [97] * 60, max_tokens=20)
        assert served.client.completions.create(**asked).choices[0].text == "a" * 20
