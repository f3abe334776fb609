# SPDX-License-Identifier: Apache-2.0
"""Creates complete or streamed answers to requests, with text, log probabilities and usage."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any, NamedTuple

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from kvcache_serve.engine import Delta, SamplingParams, TokenLogprob
from kvcache_serve.server.admission import Admission
from kvcache_serve.server.engine_loop import Answer, EngineError, EngineLoop
from kvcache_serve.server.errors import CLOSED, error_body
from kvcache_serve.server.request_fields import Asked, StreamOptions
from kvcache_serve.server.request_log import RequestLog, RequestRecord
from kvcache_serve.server.stops import StopTexts
from kvcache_serve.server.texts import AnswerText, Texts

_ROLE = {"role": "assistant"}
_NUMBERS = itertools.count()  # consecutive numbers for the IDs of answers


class Source:
    """Serves the prompts of a request in lanes. Each lane serves one prompt after another, whenever
    it is assigned rows.

    The first lane competes with all requests for rows, whereas the other lanes use only spare rows
    (see `Admission`).
    """

    def __init__(
        self,
        loop: EngineLoop,
        admission: Admission,
        log: RequestLog,
        prompts: list[list[int]],
        params: SamplingParams,
        asked: Asked,
    ) -> None:
        self.prompts, self.params = prompts, params
        self._log = log
        self._records = [RequestRecord(len(prompt)) for prompt in prompts]
        self.num_cached_tokens = 0  # cached tokens of served prompts
        self._loop, self._admission = loop, admission
        self._options = {"priority": asked.priority, "cache_salt": asked.cache_salt}
        self._numbers = iter(range(len(prompts)))

    async def deltas(self, lane: int) -> AsyncIterator[tuple[int, Answer, Delta]]:
        """Yield (prompt index, answer, delta) for each delta that arrives, until all prompts are
        answered."""
        while True:
            priority = self._options["priority"]
            async with self._admission.rows(self.params.n, is_first=lane == 0, priority=priority):
                number = next(self._numbers, None)
                if number is None:
                    return
                record = self._records[number]
                with self._log.recording(record):
                    async with self._loop.serving(
                        self.prompts[number], self.params, **self._options
                    ) as answer:
                        record.generation = answer.generation
                        is_first = True
                        async for delta in answer:
                            if is_first:
                                self.num_cached_tokens += answer.generation.num_cached_tokens
                            is_first = False
                            yield number, answer, delta

    def record(self, number: int, delta: Delta) -> None:
        """Log the tokens of a delta that belong to the answer to a prompt."""
        self._log.add(self._records[number], delta)


class Token(NamedTuple):
    """A token of a choice with its log probabilities.

    - `before`: the tokens before it, as context to decode it and its alternatives.
    - `text`: the characters that it adds to the answer. A character of several tokens belongs to the
      last one.
    - `offset`: number of characters of the answer before `text`.
    - `is_hidden`: whether it ended the answer, and is therefore not part of its text.
    """

    token_id: int
    logprob: TokenLogprob
    before: tuple[int, ...]
    text: str
    offset: int
    is_hidden: bool


class Piece(NamedTuple):
    """The new text and tokens of a choice, and the finish reason if the choice has ended."""

    choice: int
    text: str
    reason: str | None
    tokens: list[Token]  # empty unless log probabilities are requested


class Form:
    """Formats answers: IDs, object names, and texts or messages.

    - `has_logprobs`: whether choices have log probabilities.
    """

    def __init__(self, model: str, texts: Texts, *, is_chat: bool, has_logprobs: bool) -> None:
        self._model, self._texts = model, texts
        self._is_chat, self._has_logprobs = is_chat, has_logprobs
        self._id = f"{'chatcmpl' if is_chat else 'cmpl'}-{next(_NUMBERS)}"
        self._created = int(time.time())

    def body(self, choices: list[dict[str, Any]], is_chunk: bool) -> dict[str, Any]:
        """Return the body of an answer, without usage."""
        kind = "text_completion"
        if self._is_chat:
            kind = "chat.completion.chunk" if is_chunk else "chat.completion"
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def choice(self, piece: Piece, is_chunk: bool) -> dict[str, Any]:
        """Return a choice of the answer, or a chunk of a choice."""
        content: dict[str, Any] = {"text": piece.text}
        if self._is_chat:
            message = {"content": piece.text}
            content = {"delta": message} if is_chunk else {"message": _ROLE | message}
        logprobs = None
        if self._has_logprobs:
            logprobs = self._chat_logprobs(piece) if self._is_chat else self._logprobs(piece)
        return {
            **{"index": piece.choice, **content},
            **{"logprobs": logprobs, "finish_reason": piece.reason},
        }

    def openings(self, num_choices: int) -> list[dict[str, Any]]:
        """Return the first chunk of each choice of a chat, in order.

        Clients join the fields of all chunks, so only these chunks have the role. They have no text and
        no tokens, because OpenAI's client counts the log probabilities of a first chunk twice.
        """
        if not self._is_chat:
            return []
        return [
            chunk | {"delta": _ROLE | chunk["delta"]}
            for chunk in (self.choice(Piece(i, "", None, []), True) for i in range(num_choices))
        ]

    def _chat_logprobs(self, piece: Piece) -> dict[str, Any]:
        def entry(name: str, logprob: float, data: bytes | None) -> dict[str, Any]:
            return {"token": name, "logprob": logprob, "bytes": None if data is None else [*data]}

        content = []
        for each in piece.tokens:
            name, data = self._texts.token(each.token_id, each.before)
            own = entry(name, each.logprob.logprob, None if each.is_hidden else data)
            content.append(own | {"top_logprobs": [entry(*top) for top in self._top(each, name)]})
        return {"content": content, "refusal": None}

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        return {
            "tokens": [each.text for each in piece.tokens],
            "token_logprobs": [each.logprob.logprob for each in piece.tokens],
            "top_logprobs": [
                {name: logprob for name, logprob, _ in self._top(each, each.text)}
                for each in piece.tokens
            ],
            "text_offset": [each.offset for each in piece.tokens],
        }

    def _top(self, token: Token, own_name: str) -> Iterator[tuple[str, float, bytes | None]]:
        """Yield the name, log probability and bytes of each alternative to a token, including itself.

        If a name is in use, an alternative is named `token_id:N`, because clients key alternatives by
        their names.
        """
        names = {own_name}
        for token_id, logprob in token.logprob.top:
            name, data = self._texts.token(token_id, token.before)
            if token_id == token.token_id:
                name = own_name
            elif name in names:
                name = f"token_id:{token_id}"
            names.add(name)
            yield name, logprob, data


class Choices:
    """The samples for all prompts of a request. Choice i is sample i % n for prompt i // n."""

    def __init__(self, texts: Texts, stops: StopTexts, source: Source) -> None:
        self._source = source
        self._num_samples = source.params.n
        count = self._num_samples * len(source.prompts)
        prompts = [prompt for prompt in source.prompts for _ in range(self._num_samples)]
        self.texts = [AnswerText(texts, stops, prompt) for prompt in prompts]
        self.reasons: list[str | None] = [None] * count
        self.tokens: list[list[Token]] = [[] for _ in range(count)]
        # Tokens whose text is not visible yet.
        self._held: list[deque[Token]] = [deque() for _ in range(count)]
        self._num_tokens = 0

    async def pieces(self) -> AsyncIterator[Piece]:
        """Serve all prompts concurrently, and yield pieces of their answers as they arrive."""
        pieces: asyncio.Queue[Piece | Exception] = asyncio.Queue()

        async def listen(lane: int) -> None:
            try:
                async with aclosing(self._source.deltas(lane)) as deltas:
                    async for number, answer, delta in deltas:
                        for piece in self._pieces_of(number, answer, delta):
                            pieces.put_nowait(piece)
            except Exception as error:
                pieces.put_nowait(error)

        tasks = [asyncio.create_task(listen(lane)) for lane in range(len(self._source.prompts))]
        try:
            num_running = len(self.reasons)
            while num_running:
                piece = await pieces.get()
                if isinstance(piece, Exception):
                    raise piece
                num_running -= piece.reason is not None
                yield piece
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _pieces_of(self, number: int, answer: Answer, delta: Delta) -> Iterator[Piece]:
        choice = number * self._num_samples + delta.index
        if self.reasons[choice] is not None:
            return  # ignore tokens that were generated before the engine processed the stop
        text, held = self.texts[choice], self._held[choice]
        shown, num_tokens = self._add(choice, delta)
        reason = delta.finish_reason
        if reason in ("stop", "length") and not text.is_stopped:
            shown += text.end()
            if held and not held[-1].is_hidden:  # the answer may end inside a character
                held[-1] = held[-1]._replace(text=held[-1].text + text.piece)
        if text.is_stopped:
            reason = "stop"
            answer.stop(delta.index)
        self._num_tokens += num_tokens
        token_ids = delta.token_ids[:num_tokens]
        self._source.record(number, delta._replace(token_ids=token_ids, finish_reason=reason))
        if reason == "refused":  # the request is too large for this server
            raise EngineError(str(delta.error), 400)
        if reason == "error":
            raise EngineError(f"{type(delta.error).__name__}: {delta.error}")
        if reason == "abort":
            raise EngineError("the request was ended: abort")
        size, tokens = len(text.text), []
        while held and (reason is not None or held[0].offset + len(held[0].text) <= size):
            each = held.popleft()
            tokens.append(each._replace(offset=min(each.offset, size)))
        self.tokens[choice] += tokens
        self.reasons[choice] = reason
        if shown or tokens or reason is not None:
            yield Piece(choice, shown, reason, tokens)

    def _add(self, choice: int, delta: Delta) -> tuple[str, int]:
        """Add the tokens of a delta up to a stop string. Return the newly visible text, and the number of
        these tokens, which excludes drafts that were accepted after the stop string.
        """
        text, shown = self.texts[choice], ""
        for i, token in enumerate(delta.token_ids):
            before, offset, piece = text.before, text.num_decoded, ""
            is_hidden = token in self._source.params.stop_token_ids
            if not is_hidden:
                shown += text.add([token])
                piece = text.piece
            if delta.logprobs is not None:
                entry = Token(token, delta.logprobs[i], before, piece, offset, is_hidden)
                self._held[choice].append(entry)
            if text.is_stopped:
                return shown, i + 1
        return shown, len(delta.token_ids)

    def usage(self) -> dict[str, Any]:
        """Return the number of prompt tokens, answer tokens and cached tokens."""
        prompt_tokens = sum(map(len, self._source.prompts))
        cached = self._source.num_cached_tokens
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._num_tokens,
            "total_tokens": prompt_tokens + self._num_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


async def whole_answer(choices: Choices, form: Form, request: Request) -> Response:
    """Return the complete answer. If the client disconnects, stop generating it."""

    async def listen() -> None:
        async with aclosing(choices.pieces()) as pieces:
            async for _ in pieces:
                pass

    listening = asyncio.create_task(listen())
    try:
        while not listening.done():
            await asyncio.wait([listening], timeout=0.1)
            if await request.is_disconnected():
                return Response(status_code=CLOSED)
        listening.result()
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
    written = [
        form.choice(Piece(i, text.text, reason, tokens), is_chunk=False)
        for i, (text, reason, tokens) in enumerate(
            zip(choices.texts, choices.reasons, choices.tokens)
        )
    ]
    return JSONResponse(form.body(written, False) | {"usage": choices.usage()})


async def streamed_answer(
    choices: Choices, form: Form, options: StreamOptions
) -> AsyncIterator[str]:
    """Yield the answer as server-sent events."""

    def event(chosen: list[dict[str, Any]], **more: Any) -> str:
        return f"data: {json.dumps(form.body(chosen, True) | more)}\n\n"

    openings = form.openings(len(choices.texts))
    try:
        async with aclosing(choices.pieces()) as pieces:
            async for piece in pieces:
                more = {"usage": choices.usage()} if options.continuous_usage_stats else {}
                for chunk in (*openings, form.choice(piece, is_chunk=True)):
                    yield event([chunk], **more)
                openings = []
    except EngineError as error:
        # Do not send [DONE], because it marks a complete answer.
        yield f"data: {json.dumps(error_body(str(error), error.status))}\n\n"
        return
    if options.include_usage:
        yield event([], usage=choices.usage())
    yield "data: [DONE]\n\n"
