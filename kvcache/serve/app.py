"""The HTTP application: OpenAI's completions and chat completions, metrics, and the page."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException

from kvcache.serve.engine_loop import Answer, EngineError, EngineLoop
from kvcache.serve.metrics import metrics_text
from kvcache.serve.texts import AnswerText, Texts
from kvcache.serving import SamplingParams

_CLOSED = 499  # the client went away; no one reads it


# Fields of OpenAI's that may be given where they ask for nothing.
_OF_NO_EFFECT: dict[str, object] = {
    **{"frequency_penalty": 0, "presence_penalty": 0, "logprobs": False, "echo": False},
    **{"best_of": 1, "logit_bias": {}, "tools": [], "store": False, "service_tier": "auto"},
}


class StreamOptions(BaseModel):
    """Of a streamed answer."""

    include_usage: bool = False


class _Asked(BaseModel):
    """What both endpoints take. Fields of OpenAI's that are not here are refused, not ignored, unless
    they ask for nothing.
    """

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_what_asks_for_nothing(cls, body: object) -> object:
        if not isinstance(body, dict):
            return body
        return {
            name: value
            for name, value in body.items()
            if value is not None and not (name in _OF_NO_EFFECT and value == _OF_NO_EFFECT[name])
        }

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=1)] | None = None  # not of OpenAI
    n: Annotated[int, Field(ge=1, le=128)] = 1
    seed: Annotated[int, Field(ge=-(2**63) + 1, lt=2**63)] | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None  # of no effect
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0  # not of OpenAI: smaller goes first
    cache_salt: Annotated[str, Field(min_length=1)] | None = None  # not of OpenAI


class AskedCompletion(_Asked):
    """The body of /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]


class TextPart(BaseModel):
    """A part of a message; other kinds than text are refused."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def as_dict(self) -> dict[str, str]:
        """Role and whole text."""
        parts = [self.content] if isinstance(self.content, str) else [x.text for x in self.content]
        return {"role": self.role, "content": "".join(parts)}


class AskedChat(_Asked):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None


class AskError(Exception):
    """A request that cannot be served, and why."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def make_app(loop: EngineLoop, texts: Texts, model_name: str) -> FastAPI:
    """The application, for any server of ASGI; it starts `loop` with itself, and stops it.

    `texts`: tokens of prompts, texts of answers. `model_name`: what requests must ask for.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        loop.start()
        try:
            yield
        finally:
            await asyncio.to_thread(loop.stop)

    app = FastAPI(title="kvcache", lifespan=lifespan)
    endpoints = _Endpoints(loop, texts, model_name)

    @app.exception_handler(AskError)
    async def refuse(_: Request, error: AskError) -> Response:
        return _refusal(str(error), error.status)

    @app.exception_handler(EngineError)
    async def tell(_: Request, error: EngineError) -> Response:
        return _refusal(str(error), 500)

    @app.exception_handler(RequestValidationError)
    async def refuse_body(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        field = ".".join(str(each) for each in first["loc"][1:])
        return _refusal(f"{field}: {first['msg']}" if field else first["msg"], 400)

    @app.exception_handler(HTTPException)
    async def refuse_http(_: Request, error: HTTPException) -> Response:
        return _refusal(str(error.detail), error.status_code)

    @app.post("/v1/completions")
    async def completions(asked: AskedCompletion, request: Request) -> Response:
        return await endpoints.complete(asked, request)

    @app.post("/v1/chat/completions")
    async def chat_completions(asked: AskedChat, request: Request) -> Response:
        return await endpoints.chat(asked, request)

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
        return HTMLResponse(files("kvcache.serve").joinpath("page.html").read_text())

    return app


class _Endpoints:
    def __init__(self, loop: EngineLoop, texts: Texts, model_name: str) -> None:
        self._loop, self._texts, self._model = loop, texts, model_name

    async def complete(self, asked: AskedCompletion, request: Request) -> Response:
        prompts = self._prompts(asked.prompt)
        form = _Form(self._model, "cmpl", "text_completion", is_chat=False)
        return await self._serve(asked, asked.max_tokens or 16, prompts, form, request)

    async def chat(self, asked: AskedChat, request: Request) -> Response:
        prompt = self._texts.encode_chat([message.as_dict() for message in asked.messages])
        form = _Form(self._model, "chatcmpl", "chat.completion", is_chat=True)
        most = self._loop.engine.cache.plan.max_model_len - len(prompt)
        max_tokens = asked.max_completion_tokens or asked.max_tokens or max(most, 1)
        return await self._serve(asked, max_tokens, [prompt], form, request)

    def _prompts(self, prompt: str | list) -> list[list[int]]:
        if isinstance(prompt, str):
            return [self._texts.encode(prompt)]
        if prompt and isinstance(prompt[0], int):
            return [prompt]
        if not prompt:
            raise AskError("prompt is empty: expected one token or more")
        return [self._texts.encode(each) if isinstance(each, str) else each for each in prompt]

    async def _serve(
        self,
        asked: _Asked,
        max_tokens: int,
        prompts: list[list[int]],
        form: _Form,
        request: Request,
    ) -> Response:
        if asked.model != self._model:
            raise AskError(f"model is {asked.model!r}: expected {self._model!r}", 404)
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
            n=asked.n,
            seed=asked.seed,
            stop_token_ids=self._texts.end_token_ids,
        )
        stops = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
        answers: list[Answer] = []
        try:
            for prompt in prompts:
                options = {"priority": asked.priority, "cache_salt": asked.cache_salt}
                answers.append(await self._loop.add(prompt, params, **options))
        except (TypeError, ValueError) as error:
            _close(answers)
            raise AskError(str(error)) from None
        except BaseException:
            _close(answers)
            raise
        choices = _Choices(self._texts, stops, answers)
        if asked.stream:
            options = asked.stream_options or StreamOptions()
            body = _stream(choices, form, options.include_usage)
            return StreamingResponse(body, media_type="text/event-stream")
        return await _whole(choices, form, request)


class _Form:
    """How an answer is written: ids, names of objects, a text or a message."""

    def __init__(self, model: str, prefix: str, kind: str, is_chat: bool) -> None:
        self._model, self._prefix, self._kind, self.is_chat = model, prefix, kind, is_chat
        self._created = int(time.time())

    def body(self, choices: list[dict[str, Any]], name: str, is_chunk: bool) -> dict[str, Any]:
        """Everything but usage."""
        kind = f"{self._kind}.chunk" if is_chunk and self.is_chat else self._kind
        return {
            "id": f"{self._prefix}-{name}",
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def choice(self, index: int, text: str, reason: str | None, is_chunk: bool) -> dict[str, Any]:
        """One sample, or what came of it."""
        content: dict[str, Any] = {"text": text}
        if self.is_chat:
            message = {"role": "assistant", "content": text}
            content = {"delta" if is_chunk else "message": message}
        return {"index": index, **content, "logprobs": None, "finish_reason": reason}


class _Choices:
    """The samples of all prompts of a request: choice i is sample i % n of prompt i // n."""

    def __init__(self, texts: Texts, stops: list[str], answers: list[Answer]) -> None:
        self.answers = answers
        self._num_samples = answers[0].generation.params.n
        count = self._num_samples * len(answers)
        self.texts = [AnswerText(texts, stops) for _ in range(count)]
        self.reasons: list[str | None] = [None] * count
        self._num_tokens = 0

    @property
    def name(self) -> str:
        """What the request is called."""
        return self.answers[0].generation.request_id

    async def pieces(self) -> AsyncIterator[tuple[int, str, str | None]]:
        """(choice, text, reason to end) as they come, of all prompts at once."""
        pieces: asyncio.Queue[tuple[int, str, str | None] | Exception | None] = asyncio.Queue()

        async def listen(number: int, answer: Answer) -> None:
            try:
                async for delta in answer:
                    for piece in self._pieces_of(number, answer, delta):
                        pieces.put_nowait(piece)
            except Exception as error:
                pieces.put_nowait(error)
            else:
                pieces.put_nowait(None)

        tasks = [asyncio.create_task(listen(*each)) for each in enumerate(self.answers)]
        try:
            num_running = len(tasks)
            while num_running:
                piece = await pieces.get()
                if isinstance(piece, Exception):
                    raise piece
                if piece is None:
                    num_running -= 1
                else:
                    yield piece
        finally:
            for task in tasks:
                task.cancel()
            _close(self.answers)

    def _pieces_of(self, number: int, answer: Answer, delta: Any) -> list[tuple]:
        choice = number * self._num_samples + delta.index
        if self.reasons[choice] is not None:
            return []  # it went on until the engine heard of the stop text
        text, token_ids = self.texts[choice], delta.token_ids
        ends = answer.generation.params.stop_token_ids
        self._num_tokens += len(token_ids)
        shown = text.add([token for token in token_ids if token not in ends])
        if text.is_stopped:
            self.reasons[choice] = "stop"
            answer.stop(delta.index)
        elif delta.finish_reason is not None:
            shown += text.end()
            self.reasons[choice] = "stop" if delta.finish_reason == "stop" else "length"
            if delta.finish_reason in ("abort", "refused"):
                raise EngineError(f"the request was ended: {delta.finish_reason}")
        if not shown and self.reasons[choice] is None:
            return []
        return [(choice, shown, self.reasons[choice])]

    def usage(self) -> dict[str, Any]:
        """Tokens of prompts and answers, and those found in the cache."""
        generations = [answer.generation for answer in self.answers]
        prompt_tokens = sum(len(generation.prompt) for generation in generations)
        cached = sum(generation.num_cached_tokens for generation in generations)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._num_tokens,
            "total_tokens": prompt_tokens + self._num_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


async def _whole(choices: _Choices, form: _Form, request: Request) -> Response:
    async def listen() -> None:
        async for _ in choices.pieces():
            pass

    listening = asyncio.create_task(listen())
    try:
        while not listening.done():
            await asyncio.wait([listening], timeout=0.1)
            if await request.is_disconnected():
                return Response(status_code=_CLOSED)
        listening.result()
    except EngineError as error:
        return _refusal(str(error), 500)
    finally:
        listening.cancel()
        _close(choices.answers)
    written = [
        form.choice(i, text.text, reason, is_chunk=False)
        for i, (text, reason) in enumerate(zip(choices.texts, choices.reasons))
    ]
    return JSONResponse(form.body(written, choices.name, False) | {"usage": choices.usage()})


async def _stream(choices: _Choices, form: _Form, include_usage: bool) -> AsyncIterator[str]:
    def event(chosen: list[dict[str, Any]], **more: Any) -> str:
        return f"data: {json.dumps(form.body(chosen, choices.name, True) | more)}\n\n"

    try:
        async for index, text, reason in choices.pieces():
            yield event([form.choice(index, text, reason, is_chunk=True)])
    except EngineError as error:
        yield f"data: {json.dumps(_error(str(error), 500))}\n\n"
        return
    finally:
        _close(choices.answers)
    if include_usage:
        yield event([], usage=choices.usage())
    yield "data: [DONE]\n\n"


def _close(answers: list[Answer]) -> None:
    for answer in answers:
        answer.close()


def _refusal(message: str, status: int) -> Response:
    return JSONResponse(_error(message, status), status_code=status)


def _error(message: str, status: int) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
