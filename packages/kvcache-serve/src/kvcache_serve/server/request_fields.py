# SPDX-License-Identifier: Apache-2.0
"""The request bodies of OpenAI's API, including additional fields of vLLM that load generators
use.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from kvcache.checks import shown

_MOST_LOGPROBS = 20  # OpenAI's limit, and vLLM's default
_MOST_STOP_TOKENS = 128
_MOST_METADATA = 16  # OpenAI's limit

# Unsupported fields, with the values that are accepted because they request no special behavior.
_OF_NO_EFFECT: dict[str, tuple[object, ...]] = {
    **{"frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},), "echo": (False,)},
    **{"store": (False,), "service_tier": ("auto", "default"), "modalities": (["text"],)},
    # vLLM's additional fields:
    **{"top_k": (-1,), "min_p": (0,), "min_tokens": (0,), "use_beam_search": (False,)},
    **{"length_penalty": (1,), "add_special_tokens": (True,), "skip_special_tokens": (True,)},
    **{"include_stop_str_in_output": (False,), "spaces_between_special_tokens": (True,)},
}


def _has_no_effect(name: str, value: object) -> bool:
    """Return whether a field can be ignored. Numbers are not booleans: `echo: 0` is rejected."""
    return any(
        value == nothing and isinstance(value, bool) == isinstance(nothing, bool)
        for nothing in _OF_NO_EFFECT.get(name, ())
    )


def refuse(message: str, param: str | None = None, code: str = "invalid_value") -> NoReturn:
    """Raised by validators to reject a body. The message is returned to the client unchanged.

    Args:
        message: The message. If the validator of a field raises the error, the field's path is
            prepended.
        param: The invalid field, if the validator of an object raises the error.
        code: The error code.
    """
    context = {"message": message, "param": param, "code": code}
    raise PydanticCustomError("refused", "{message}", context)


class Fields(BaseModel):
    """An object in a request body.

    Unknown fields are rejected and types are not converted. A field with the value null is treated
    as missing, unless the field is required.
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


class StreamOptions(Fields):
    """Options of a streamed answer."""

    include_usage: bool = False
    # vLLM's field: report usage in each event, not only in the last one.
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


def _not_served(*served: object) -> BeforeValidator:
    """Return a validator that accepts only the supported values."""

    def check(value: object) -> object:
        if value not in served:
            names = " or ".join(repr(each) for each in served)
            message = f"is {shown(value)}: not supported by this server, expected {names}"
            refuse(message, code="unsupported_value")
        return value

    return BeforeValidator(check)


class ResponseFormat(Fields):
    """The format of the answer. Only plain text is supported, without a schema or a grammar."""

    type: Annotated[Literal["text"], _not_served("text")]


def _stop_texts(value: object) -> object:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        refuse("Input should be a text or a list of texts")
    return value


class Asked(Fields):
    """Fields supported by both endpoints.

    OpenAI fields that are not listed here are rejected unless their value has no effect.
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
    n: Annotated[int, Field(ge=1, le=128)] = 1
    seed: Annotated[int, Field(ge=-(2**63) + 1, lt=2**63)] | None = None
    best_of: int | None = None  # must equal n, because all samples are returned
    stop: Annotated[list[str], BeforeValidator(_stop_texts)] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    # These fields are ignored. They serve only for the client's records, or configure features that
    # are not supported.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: Annotated[dict[str, str], Field(max_length=_MOST_METADATA)] = {}
    # Fields that OpenAI's API does not have.
    top_k: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] = 1.0
    ignore_eos: bool = False
    stop_token_ids: Annotated[
        list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=_MOST_STOP_TOKENS)
    ] = []
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0  # smaller values are served first
    cache_salt: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _agrees(self) -> Asked:
        if self.best_of not in (None, self.n):
            refuse(
                f"best_of is {shown(self.best_of)}: expected {self.n}, the value of n", "best_of"
            )
        if self.stream_options is not None and not self.stream:
            message = "stream_options is given: expected it only if stream is true"
            refuse(message, "stream_options")
        return self

    @property
    def stops(self) -> list[str]:
        """Return the non-empty stop strings."""
        return [stop for stop in self.stop if stop]

    @property
    def num_logprobs(self) -> int | None:
        """Number of most likely alternatives to return for each token. None: no log
        probabilities.
        """
        raise NotImplementedError


class AskedCompletion(Asked):
    """The body of /v1/completions."""

    prompt: Any  # a text, a list of tokens, or a list of either; validated by the endpoint
    logprobs: Annotated[int, Field(ge=0, le=_MOST_LOGPROBS)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class TextPart(Fields):
    """A text part of a message. Other types are rejected."""

    type: Literal["text"]
    text: str


def _text_parts(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        refuse("Input should be a text or a list of text parts")
    return value


class Message(Fields):
    """A chat message."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart], BeforeValidator(_text_parts)]

    def as_dict(self) -> dict[str, str]:
        """Return the message's role and complete text."""
        return {"role": self.role, "content": "".join(part.text for part in self.content)}


Messages = Annotated[list[Message], Field(min_length=1)]


class AskedChat(Asked):
    """The body of /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=_MOST_LOGPROBS)] | None = None
    # Tools are accepted only if the model is not allowed to call them.
    tools: list[dict[str, Any]] = []
    tool_choice: Annotated[Literal["none"], _not_served("none")] | None = None
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _agree_in_chat(self) -> AskedChat:
        limits = self.max_completion_tokens, self.max_tokens
        if None not in limits and limits[0] != limits[1]:
            refuse(
                f"max_completion_tokens is {limits[0]} and max_tokens is {limits[1]}: expected only "
                "one of the two, or equal values",
                "max_completion_tokens",
            )
        if self.top_logprobs is not None and not self.logprobs:
            message = f"top_logprobs is {self.top_logprobs}: expected it only if logprobs is true"
            refuse(message, "top_logprobs")
        if self.tools and self.tool_choice is None:
            refuse(
                f"tools has {len(self.tools)} entries: tool calls are not supported by this server, "
                "expected none, "
                "or tool_choice 'none'",
                "tools",
                "unsupported_parameter",
            )
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class AskedWeights(Fields):
    """The body of /v1/weights, which announces new weights."""

    model: str
    model_version: str | None = None  # None: a name that no other engine has
