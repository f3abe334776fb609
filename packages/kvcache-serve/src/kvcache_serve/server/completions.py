# SPDX-License-Identifier: Apache-2.0
"""The endpoints for completions and chat completions."""

from __future__ import annotations

from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from kvcache.checks import shown
from kvcache_serve.engine import SamplingParams
from kvcache_serve.server.admission import Admission
from kvcache_serve.server.answers import Choices, Form, Source, streamed_answer, whole_answer
from kvcache_serve.server.body_reader import apart, parsed, read_body, refuse_untrusted
from kvcache_serve.server.engine_loop import EngineLoop
from kvcache_serve.server.errors import CONTEXT_CODE, AskError
from kvcache_serve.server.hints import AskedHints, hint_of
from kvcache_serve.server.limits import Limits
from kvcache_serve.server.prompts import PromptReader
from kvcache_serve.server.request_fields import (
    Asked,
    AskedChat,
    AskedCompletion,
    AskedWeights,
    StreamOptions,
)
from kvcache_serve.server.request_log import RequestLog
from kvcache_serve.server.stops import StopTexts
from kvcache_serve.server.texts import Texts

# Fields that can affect other clients. They are rejected unless clients are trusted.
_OF_TRUSTED = ("cache_salt", "priority")
AskedKind = TypeVar("AskedKind", bound=Asked)


class Completions:
    """Serves requests for completions and chat completions.

    Attributes:
        reader: Reads prompts.
        max_body_bytes: Maximum size of a request body in bytes.
    """

    def __init__(
        self,
        loop: EngineLoop,
        texts: Texts,
        model_name: str,
        admission: Admission,
        log: RequestLog,
        limits: Limits,
        trust_clients: bool,
    ) -> None:
        self._loop, self._texts, self._model = loop, texts, model_name
        self._admission, self._log = admission, log
        self._limits, self._trust_clients = limits, trust_clients
        self._max_model_len = loop.engine.cache.plan.max_model_len
        self.reader = PromptReader(texts, self._max_model_len)
        self._vocab_size = loop.engine.model.vocab_size
        self.max_body_bytes = limits.body_bytes(self._max_model_len)

    async def complete(self, request: Request) -> Response:
        """Answer /v1/completions."""
        asked = await self._asked(request, AskedCompletion)
        prompts = [(name, await self._tokens_of(each)) for name, each in self._prompts(asked)]
        return await self._serve(asked, asked.max_tokens or 16, prompts, request)

    async def chat(self, request: Request) -> Response:
        """Answer /v1/chat/completions."""
        asked = await self._asked(request, AskedChat)
        prompt = await self.reader.chat_tokens(asked.messages)
        most = self._max_model_len - len(prompt)
        max_tokens = asked.max_completion_tokens or asked.max_tokens or max(most, 1)
        return await self._serve(asked, max_tokens, [("messages", prompt)], request)

    async def hint(self, request: Request) -> dict[str, Any]:
        """Serve /v1/kv_hints: carry out hints about a prompt without completing it."""
        self._admission.check()
        body = await read_body(request, self.max_body_bytes)
        asked = await apart(len(body), parsed, body, AskedHints)
        self.check_model(asked.model)
        if not self._trust_clients:
            refuse_untrusted(asked, ("cache_salt", "kv_hints"))
        if asked.messages is not None:
            tokens = await self.reader.chat_tokens(asked.messages)
        else:
            self._check_prompt("prompt", asked.prompt)
            tokens = await self._tokens_of(asked.prompt)
        if len(tokens) > self._max_model_len:
            raise AskError(
                f"the prompt has {len(tokens)} tokens: expected at most {self._max_model_len}, "
                "max_model_len",
                param="prompt",
                code=CONTEXT_CODE,
            )
        hints = [hint_of(each, i) for i, each in enumerate(asked.kv_hints)]
        receipts = await self._loop.receipts(tokens, hints, asked.cache_salt)
        return {"receipts": [each.to_dict() for each in receipts]}

    async def new_weights(self, request: Request) -> dict[str, Any]:
        """Serve /v1/weights: start an epoch of the cache between two steps."""
        body = await read_body(request, self.max_body_bytes)
        asked = await apart(len(body), parsed, body, AskedWeights)
        self.check_model(asked.model)
        if not self._trust_clients:
            raise AskError(
                "new weights empty the cache of all clients: expected a server that trusts its clients "
                "(`kvcache serve --trust-clients`)",
                403,
            )
        cache = self._loop.engine.cache.manager.cache
        try:
            await self._loop.ask(lambda _: cache.start_epoch(asked.model_version))
        except ValueError as error:
            raise AskError(str(error), param="model_version") from None
        return {"model_version": cache.model_version, "epoch": cache.epoch}

    def check_model(self, name: str) -> None:
        """Raise AskError with status 404 unless the request names the served model."""
        if name != self._model:
            message = f"model is {shown(name)}: expected {self._model!r}"
            raise AskError(message, 404, param="model", code="model_not_found")

    async def _asked(self, request: Request, kind: type[AskedKind]) -> AskedKind:
        """Run all checks that do not depend on the prompts, and return the body."""
        self._admission.check()
        body = await read_body(request, self.max_body_bytes)
        asked = await apart(len(body), parsed, body, kind)
        self.check_model(asked.model)
        if not self._trust_clients:
            refuse_untrusted(asked, _OF_TRUSTED)
        stops = asked.stops
        if len(stops) > self._limits.max_stops:
            raise AskError(
                f"stop has {len(stops)} strings: expected at most {self._limits.max_stops}",
                param="stop",
            )
        longest = max(map(len, stops), default=0)
        if longest > self._limits.max_stop_length:
            raise AskError(
                f"stop has a string of {longest} characters: expected at most "
                f"{self._limits.max_stop_length}",
                param="stop",
            )
        return asked

    def _prompts(self, asked: AskedCompletion) -> list[tuple[str, Any]]:
        """Return the name and value of each prompt. A value is either a string or a list of
        tokens.
        """
        prompt = asked.prompt
        are_several = isinstance(prompt, list) and set(map(type, prompt)) in ({str}, {list})
        if are_several and len(prompt) * asked.n > self._limits.max_choices:
            raise AskError(
                f"prompt has {len(prompt)} entries, and n is {asked.n}: expected at most "
                f"{self._limits.max_choices} choices in total",
                param="prompt",
            )
        prompts = [("prompt", prompt)]
        if are_several:
            prompts = [(f"prompt[{i}]", each) for i, each in enumerate(prompt)]
        for name, each in prompts:
            self._check_prompt(name, each)
        return prompts

    def _check_prompt(self, name: str, prompt: Any) -> None:
        """Raise AskError unless a prompt is a string or a list of tokens that is not obviously too
        long.
        """
        if prompt in ("", []):
            raise AskError(f"{name} is empty: expected one token or more", param=name)
        if isinstance(prompt, str):
            self.reader.check_length(name, len(prompt))
        elif not isinstance(prompt, list) or set(map(type, prompt)) - {int}:
            raise AskError(
                f"{name} is {shown(prompt)}: expected a string or a list of tokens, or a list of these",
                param=name,
            )
        elif len(prompt) > self._max_model_len:
            raise AskError(
                f"{name} has {len(prompt)} tokens: expected at most {self._max_model_len}, "
                "max_model_len, including the answer",
                param=name,
                code=CONTEXT_CODE,
            )
        elif not 0 <= min(prompt) <= max(prompt) < self._vocab_size:
            wrong = next(token for token in prompt if not 0 <= token < self._vocab_size)
            raise AskError(
                f"{name} has the token {shown(wrong)}: expected 0 to {self._vocab_size - 1}, the "
                "model's token IDs",
                param=name,
            )

    async def _tokens_of(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        return await apart(len(prompt), self._texts.encode, prompt)

    async def _serve(
        self,
        asked: Asked,
        max_tokens: int,
        prompts: list[tuple[str, list[int]]],
        request: Request,
    ) -> Response:
        ends = () if asked.ignore_eos else self._texts.end_token_ids
        try:
            params = SamplingParams(
                max_tokens=max_tokens,
                temperature=asked.temperature,
                top_p=asked.top_p,
                top_k=asked.top_k,
                n=asked.n,
                seed=asked.seed,
                stop_token_ids=(*ends, *asked.stop_token_ids),
                repetition_penalty=asked.repetition_penalty,
                logprobs=asked.num_logprobs,
            )
            for name, prompt in prompts:
                self._loop.engine.check(prompt, params, name=name)
        except (TypeError, ValueError) as error:
            # The message starts with the argument's name, which is also the field's name.
            message = str(error)
            code = CONTEXT_CODE if message.endswith("max_model_len") else None
            raise AskError(message, param=message.partition(" ")[0], code=code) from None
        tokens = [prompt for _, prompt in prompts]
        source = Source(self._loop, self._admission, self._log, tokens, params, asked)
        choices = Choices(self._texts, StopTexts(asked.stops), source)
        is_chat = isinstance(asked, AskedChat)
        form = Form(
            self._model, self._texts, is_chat=is_chat, has_logprobs=params.logprobs is not None
        )
        if asked.stream:
            body = streamed_answer(choices, form, asked.stream_options or StreamOptions())
            return StreamingResponse(body, media_type="text/event-stream")
        return await whole_answer(choices, form, request)
