"""The HTTP application, with OpenAI's completions and chat completions, metrics, and the cache
page.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from importlib.resources import files
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from kvcache.checks import check_name, flag, instance, shown
from kvcache.engine import Delta, SamplingParams
from kvcache.server.admission import Admission, Busy
from kvcache.server.bodies import AskError, apart, parsed, read_body, refuse_untrusted
from kvcache.server.engine_loop import Answer, EngineError, EngineLoop
from kvcache.server.limits import Limits
from kvcache.server.metrics import metrics_text
from kvcache.server.prefill import add_prefill
from kvcache.server.stops import StopTexts
from kvcache.server.texts import AnswerText, Texts
from kvcache.sources.disaggregation import Connector

_CLOSED = 499  # status for disconnected clients, which never read it
_SECONDS_TO_RETRY = 1  # retry delay sent to clients when too many requests wait
_NUMBERS = itertools.count()  # numbers of answers
# Fields that affect other clients. They are rejected unless clients are trusted.
_OF_TRUSTED = ("cache_salt", "priority")

# OpenAI fields that are accepted only with these values, which have no effect.
_OF_NO_EFFECT: dict[str, object] = {
    **{"frequency_penalty": 0, "presence_penalty": 0, "logprobs": False, "echo": False},
    **{"logit_bias": {}, "tools": [], "store": False, "service_tier": "auto"},
}


def _has_no_effect(name: str, value: object) -> bool:
    """Return whether a field can be ignored. Numbers and booleans differ: `logprobs: 0` has an effect."""
    if name not in _OF_NO_EFFECT:
        return False
    nothing = _OF_NO_EFFECT[name]
    return value == nothing and isinstance(value, bool) == isinstance(nothing, bool)


def _refuse(message: str) -> NoReturn:
    """Reject a body from within a validator, with this message unchanged."""
    raise PydanticCustomError("refused", "{message}", {"message": message})


class _Fields(BaseModel):
    """An object in a request body.

    Unknown fields are rejected and types are not converted. null is treated as a missing field,
    unless the field is required.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: object) -> object:
        if not isinstance(body, dict):
            return body
        required = [name for name, field in cls.model_fields.items() if field.is_required()]
        return {
            name: value for name, value in body.items() if value is not None or name in required
        }


class StreamOptions(_Fields):
    """Options of a streamed answer."""

    include_usage: bool = False


def _stop_texts(value: object) -> object:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        _refuse("Input should be a text or a list of texts")
    return value


class _Asked(_Fields):
    """Fields supported by both endpoints.

    OpenAI fields that are not listed here are rejected, not ignored, unless their value has no effect.
    """

    @model_validator(mode="before")
    @classmethod
    def _without_what_asks_for_nothing(cls, body: object) -> object:
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if not _has_no_effect(name, value)}

    model: str
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=1, lt=2**31)] | None = None  # not an OpenAI field
    n: Annotated[int, Field(ge=1, le=128)] = 1
    seed: Annotated[int, Field(ge=-(2**63) + 1, lt=2**63)] | None = None
    best_of: int | None = None  # must not exceed n, because only returned samples are drawn
    stop: Annotated[list[str], BeforeValidator(_stop_texts)] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None  # no effect
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0  # not an OpenAI field; smaller first
    cache_salt: Annotated[str, Field(min_length=1)] | None = None  # not an OpenAI field

    @model_validator(mode="after")
    def _agrees(self) -> _Asked:
        if self.best_of not in (None, self.n):
            _refuse(f"best_of is {shown(self.best_of)}: expected {self.n}, as n")
        if self.stream_options is not None and not self.stream:
            _refuse("stream_options is given: expected it only where stream is true")
        return self

    @property
    def stops(self) -> list[str]:
        """Return the non-empty stop texts."""
        return [stop for stop in self.stop if stop]


_AskedKind = TypeVar("_AskedKind", bound=_Asked)


class AskedCompletion(_Asked):
    """The body of /v1/completions."""

    prompt: Any  # validated by `_prompts` up to the first invalid entry


class TextPart(_Fields):
    """A text part of a message. Other types are rejected."""

    type: Literal["text"]
    text: str


def _text_parts(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        _refuse("Input should be a text or a list of text parts")
    return value


class Message(_Fields):
    """A chat message."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart], BeforeValidator(_text_parts)]

    def as_dict(self) -> dict[str, str]:
        """Return the role and the complete text."""
        return {"role": self.role, "content": "".join(part.text for part in self.content)}


class AskedChat(_Asked):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None

    @model_validator(mode="after")
    def _has_one_limit(self) -> AskedChat:
        limits = self.max_completion_tokens, self.max_tokens
        if None not in limits and limits[0] != limits[1]:
            _refuse(
                f"max_completion_tokens is {limits[0]} and max_tokens is {limits[1]}: expected one of "
                "them, or the same in both"
            )
        return self


def make_app(
    loop: EngineLoop,
    texts: Texts,
    model_name: str,
    *,
    limits: Limits | None = None,
    trust_clients: bool = False,
    connector: Connector | None = None,
) -> FastAPI:
    """Create the application, for `Server` or another ASGI server. It starts and stops `loop`.

    Args:
        loop: The engine loop, not started.
        texts: Tokenizes prompts and decodes answers.
        model_name: The model name that requests must use.
        limits: Limits of requests. Only `Server` enforces the limits of connections.
        trust_clients: Whether requests may set `cache_salt` and `priority`, which are otherwise
            rejected. A client could use another client's salt to share its cache, and a priority to
            overtake other clients.
        connector: A source of the engine. If given, other servers can have prompts prefilled here
            (`/prefill`) and load their KV.
    """
    limits = Limits() if limits is None else limits
    instance(loop, EngineLoop, "loop")
    check_name(model_name, "model_name")
    instance(limits, Limits, "limits")
    flag(trust_clients, "trust_clients")
    if connector is not None:
        instance(connector, Connector, "connector")

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        loop.start()
        try:
            yield
        finally:
            await asyncio.to_thread(loop.stop)

    app = FastAPI(title="kvcache", lifespan=lifespan, openapi_url=None)
    num_rows = loop.engine.scheduler.max_num_rows
    admission = Admission(num_rows, limits.max_waiting)
    app.state.loop, app.state.admission, app.state.limits = loop, admission, limits
    endpoints = _Endpoints(loop, texts, model_name, admission, limits, trust_clients)

    @app.exception_handler(AskError)
    async def refuse(_: Request, error: AskError) -> Response:
        return _refusal(str(error), error.status, error.headers)

    @app.exception_handler(EngineError)
    async def tell(_: Request, error: EngineError) -> Response:
        return _refusal(str(error), error.status)

    @app.exception_handler(Busy)
    async def send_away(_: Request, error: Busy) -> Response:
        return _refusal(str(error), 429, {"retry-after": str(_SECONDS_TO_RETRY)})

    @app.exception_handler(ClientDisconnect)
    async def forget(_: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=_CLOSED)

    @app.exception_handler(HTTPException)
    async def refuse_http(_: Request, error: HTTPException) -> Response:
        return _refusal(str(error.detail), error.status_code)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await endpoints.complete(request)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await endpoints.chat(request)

    if connector is not None:
        add_prefill(
            app,
            loop,
            connector,
            admission,
            max_body_bytes=limits.body_bytes(loop.engine.cache.plan.max_model_len),
            trust_clients=trust_clients,
        )

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        entry = {"id": model_name, "object": "model", "created": 0, "owned_by": "kvcache"}
        return {"object": "list", "data": [entry]}

    @app.get("/metrics")
    async def metrics() -> Response:
        text = metrics_text(loop.state, loop.cache_metrics)
        return Response(text, media_type="text/plain; version=0.0.4")

    @app.get("/state")
    async def state() -> Response:
        return JSONResponse(loop.state | {"model": model_name})

    @app.get("/")
    async def page() -> Response:
        return HTMLResponse(files("kvcache.server").joinpath("page.html").read_text())

    return app


class _Endpoints:
    def __init__(
        self,
        loop: EngineLoop,
        texts: Texts,
        model_name: str,
        admission: Admission,
        limits: Limits,
        trust_clients: bool,
    ) -> None:
        self._loop, self._texts, self._model = loop, texts, model_name
        self._admission, self._limits, self._trust_clients = admission, limits, trust_clients
        self._max_model_len = loop.engine.cache.plan.max_model_len
        self._vocab_size = loop.engine.model.vocab_size
        self._max_body_bytes = limits.body_bytes(self._max_model_len)

    async def complete(self, request: Request) -> Response:
        asked = await self._asked(request, AskedCompletion)
        prompts = [(name, await self._tokens_of(each)) for name, each in self._prompts(asked)]
        form = _Form(self._model, "cmpl", "text_completion", is_chat=False)
        return await self._serve(asked, asked.max_tokens or 16, prompts, form, request)

    async def chat(self, request: Request) -> Response:
        asked = await self._asked(request, AskedChat)
        messages = [message.as_dict() for message in asked.messages]
        size = sum(len(message["content"]) for message in messages)
        self._check_length("messages", size)
        try:
            prompt = await apart(size, self._texts.encode_chat, messages)
        except (
            Exception
        ) as error:  # a template may raise an error, for example for an order of roles
            raise AskError(f"messages are refused by the model's template: {error}") from None
        form = _Form(self._model, "chatcmpl", "chat.completion", is_chat=True)
        most = self._max_model_len - len(prompt)
        max_tokens = asked.max_completion_tokens or asked.max_tokens or max(most, 1)
        return await self._serve(asked, max_tokens, [("messages", prompt)], form, request)

    async def _asked(self, request: Request, kind: type[_AskedKind]) -> _AskedKind:
        """Return the body, validated as far as possible without its prompts."""
        self._admission.check()
        body = await read_body(request, self._max_body_bytes)
        asked = await apart(len(body), parsed, body, kind)
        if asked.model != self._model:
            raise AskError(f"model is {shown(asked.model)}: expected {self._model!r}", 404)
        if not self._trust_clients:
            refuse_untrusted(asked, _OF_TRUSTED)
        stops = asked.stops
        if len(stops) > self._limits.max_stops:
            raise AskError(
                f"stop has {len(stops)} texts: expected at most {self._limits.max_stops}"
            )
        longest = max(map(len, stops), default=0)
        if longest > self._limits.max_stop_length:
            raise AskError(
                f"stop has a text of {longest} characters: expected at most "
                f"{self._limits.max_stop_length}"
            )
        return asked

    def _prompts(self, asked: AskedCompletion) -> list[tuple[str, Any]]:
        """Yield the name and value of each prompt, which is a text or a list of tokens."""
        prompt = asked.prompt
        are_several = isinstance(prompt, list) and set(map(type, prompt)) in ({str}, {list})
        if are_several and len(prompt) * asked.n > self._limits.max_choices:
            raise AskError(
                f"prompt has {len(prompt)} entries, and n is {asked.n}: expected at most "
                f"{self._limits.max_choices} choices together"
            )
        prompts = [("prompt", prompt)]
        if are_several:
            prompts = [(f"prompt[{i}]", each) for i, each in enumerate(prompt)]
        for name, each in prompts:
            if each in ("", []):
                raise AskError(f"{name} is empty: expected one token or more")
            if isinstance(each, str):
                self._check_length(name, len(each))
            elif not isinstance(each, list) or set(map(type, each)) - {int}:
                raise AskError(
                    f"{name} is {shown(each)}: expected a text or a list of tokens, or a list of either"
                )
            elif len(each) > self._max_model_len:
                raise AskError(
                    f"{name} has {len(each)} tokens: expected at most {self._max_model_len} with the "
                    "answer, max_model_len"
                )
            elif not 0 <= min(each) <= max(each) < self._vocab_size:
                wrong = next(token for token in each if not 0 <= token < self._vocab_size)
                raise AskError(
                    f"{name} has the token {shown(wrong)}: expected 0 to {self._vocab_size - 1}, those "
                    "of the model"
                )
        return prompts

    def _check_length(self, name: str, size: int) -> None:
        """Reject a text before tokenization if its length implies too many tokens."""
        most = self._max_model_len * self._texts.longest_token
        if size > most:
            raise AskError(
                f"{name} has {size} characters: expected at most {most}, or {self._max_model_len} tokens "
                "with the answer, max_model_len"
            )

    async def _tokens_of(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        return await apart(len(prompt), self._texts.encode, prompt)

    async def _serve(
        self,
        asked: _Asked,
        max_tokens: int,
        prompts: list[tuple[str, list[int]]],
        form: _Form,
        request: Request,
    ) -> Response:
        try:
            params = SamplingParams(
                max_tokens=max_tokens,
                temperature=asked.temperature,
                top_p=asked.top_p,
                top_k=asked.top_k,
                n=asked.n,
                seed=asked.seed,
                stop_token_ids=self._texts.end_token_ids,
            )
            for name, prompt in prompts:
                self._loop.engine.check(prompt, params, name=name)
        except (TypeError, ValueError) as error:
            raise AskError(str(error)) from None
        tokens = [prompt for _, prompt in prompts]
        source = _Source(self._loop, self._admission, tokens, params, asked)
        choices = _Choices(self._texts, StopTexts(asked.stops), source)
        if asked.stream:
            options = asked.stream_options or StreamOptions()
            body = _stream(choices, form, options.include_usage)
            return StreamingResponse(body, media_type="text/event-stream")
        return await _whole(choices, form, request)


class _Source:
    """The prompts of a request, which are served in lanes. Each lane takes the next prompt when it
    gets rows.

    The first lane competes with all requests, whereas the other lanes use spare rows (see
    `Admission`).
    """

    def __init__(
        self,
        loop: EngineLoop,
        admission: Admission,
        prompts: list[list[int]],
        params: SamplingParams,
        asked: _Asked,
    ) -> None:
        self.prompts, self.params = prompts, params
        self.num_cached_tokens = 0  # cached tokens of served prompts
        self._loop, self._admission = loop, admission
        self._options = {"priority": asked.priority, "cache_salt": asked.cache_salt}
        self._numbers = iter(range(len(prompts)))

    async def deltas(self, lane: int) -> AsyncIterator[tuple[int, Answer, Delta]]:
        """Yield (prompt index, answer, delta) as they arrive, until no prompts are left."""
        while True:
            priority = self._options["priority"]
            async with self._admission.rows(self.params.n, is_first=lane == 0, priority=priority):
                number = next(self._numbers, None)
                if number is None:
                    return
                async with self._loop.serving(
                    self.prompts[number], self.params, **self._options
                ) as answer:
                    is_first = True
                    async for delta in answer:
                        if is_first:
                            self.num_cached_tokens += answer.generation.num_cached_tokens
                        is_first = False
                        yield number, answer, delta


class _Form:
    """The format of an answer, with IDs, object names, and text or message."""

    def __init__(self, model: str, prefix: str, kind: str, is_chat: bool) -> None:
        self._model, self._kind, self.is_chat = model, kind, is_chat
        self._id = f"{prefix}-{next(_NUMBERS)}"
        self._created = int(time.time())

    def body(self, choices: list[dict[str, Any]], is_chunk: bool) -> dict[str, Any]:
        """Return the body without usage."""
        kind = f"{self._kind}.chunk" if is_chunk and self.is_chat else self._kind
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def choice(self, index: int, text: str, reason: str | None, is_chunk: bool) -> dict[str, Any]:
        """Return one sample, or a chunk of it."""
        content: dict[str, Any] = {"text": text}
        if self.is_chat:
            message = {"role": "assistant", "content": text}
            content = {"delta" if is_chunk else "message": message}
        return {"index": index, **content, "logprobs": None, "finish_reason": reason}


class _Choices:
    """The samples of all prompts of a request. Choice i is sample i % n of prompt i // n."""

    def __init__(self, texts: Texts, stops: StopTexts, source: _Source) -> None:
        self._source = source
        self._num_samples = source.params.n
        count = self._num_samples * len(source.prompts)
        self.texts = [AnswerText(texts, stops) for _ in range(count)]
        self.reasons: list[str | None] = [None] * count
        self._num_tokens = 0

    async def pieces(self) -> AsyncIterator[tuple[int, str, str | None]]:
        """Yield (choice, text, finish reason) as they arrive, for all prompts concurrently."""
        pieces: asyncio.Queue[tuple[int, str, str | None] | Exception] = asyncio.Queue()

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
                num_running -= piece[2] is not None
                yield piece
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _pieces_of(self, number: int, answer: Answer, delta: Delta) -> Iterator[tuple]:
        choice = number * self._num_samples + delta.index
        if self.reasons[choice] is not None:
            return  # the tokens were generated before the engine processed the stop
        text, token_ids = self.texts[choice], delta.token_ids
        ends = self._source.params.stop_token_ids
        self._num_tokens += len(token_ids)
        shown = text.add([token for token in token_ids if token not in ends])
        if text.is_stopped:
            self.reasons[choice] = "stop"
            answer.stop(delta.index)
        elif delta.finish_reason is not None:
            if delta.finish_reason == "error":
                raise EngineError(f"{type(delta.error).__name__}: {delta.error}")
            if delta.finish_reason in ("abort", "refused"):
                raise EngineError(f"the request was ended: {delta.finish_reason}")
            shown += text.end()
            is_stop = text.is_stopped or delta.finish_reason == "stop"
            self.reasons[choice] = "stop" if is_stop else "length"
        if shown or self.reasons[choice] is not None:
            yield choice, shown, self.reasons[choice]

    def usage(self) -> dict[str, Any]:
        """Return the token counts of prompts and answers, and of cached tokens."""
        prompt_tokens = sum(map(len, self._source.prompts))
        cached = self._source.num_cached_tokens
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._num_tokens,
            "total_tokens": prompt_tokens + self._num_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


async def _whole(choices: _Choices, form: _Form, request: Request) -> Response:
    async def listen() -> None:
        async with aclosing(choices.pieces()) as pieces:
            async for _ in pieces:
                pass

    listening = asyncio.create_task(listen())
    try:
        while not listening.done():
            await asyncio.wait([listening], timeout=0.1)
            if await request.is_disconnected():
                return Response(status_code=_CLOSED)
        listening.result()
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
    written = [
        form.choice(i, text.text, reason, is_chunk=False)
        for i, (text, reason) in enumerate(zip(choices.texts, choices.reasons))
    ]
    return JSONResponse(form.body(written, False) | {"usage": choices.usage()})


async def _stream(choices: _Choices, form: _Form, include_usage: bool) -> AsyncIterator[str]:
    def event(chosen: list[dict[str, Any]], **more: Any) -> str:
        return f"data: {json.dumps(form.body(chosen, True) | more)}\n\n"

    try:
        async with aclosing(choices.pieces()) as pieces:
            async for index, text, reason in pieces:
                yield event([form.choice(index, text, reason, is_chunk=True)])
    except EngineError as error:
        # Do not send [DONE], because it marks a complete answer.
        yield f"data: {json.dumps(_error(str(error), error.status))}\n\n"
        return
    if include_usage:
        yield event([], usage=choices.usage())
    yield "data: [DONE]\n\n"


def _refusal(message: str, status: int, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse(_error(message, status), status_code=status, headers=headers)


def _error(message: str, status: int) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
