# SPDX-License-Identifier: Apache-2.0
"""Reads request bodies of limited size, and parses and validates them.

Errors name the invalid field.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from kvcache.checks import shown
from kvcache_serve.server.errors import AskError

T = TypeVar("T")
Body = TypeVar("Body", bound=BaseModel)
_MOST_NESTED = 32  # maximum nesting depth of lists and objects, for example in tool schemas
_MOST_DROPPED = 2**22  # maximum number of bytes to read and discard from an oversized body
# Maximum number of bytes or characters to process in the event loop, which takes about a
# millisecond.
_MOST_AT_ONCE = 2**16


def refuse_untrusted(asked: BaseModel, names: tuple[str, ...]) -> None:
    """Unless the server trusts its clients, raise AskError for fields that affect other clients."""
    for name in names:
        if getattr(asked, name):
            raise AskError(
                f"{name} is given: expected none, because this server does not trust its clients "
                "(`kvcache serve --trust-clients`)",
                param=name,
            )


async def apart(size: int, call: Callable[..., T], *args: object) -> T:
    """Return `call(*args)`. If `size` is large, the call runs in a separate thread."""
    return await asyncio.to_thread(call, *args) if size > _MOST_AT_ONCE else call(*args)


async def read_body(request: Request, most: int) -> bytes:
    """Read the body.

    A part of an oversized body is read and discarded, because most clients read the response only
    after they have sent the complete body.

    Raises:
        AskError: The body has more than `most` bytes (status 413), or is compressed (status 415).
    """
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size <= most:
            pieces.append(piece)
        elif size > most + _MOST_DROPPED:
            break
    if size > most:
        raise AskError(f"the body has more than {most} bytes: expected at most {most}", 413)
    for coding in ",".join(request.headers.getlist("content-encoding")).split(","):
        if coding.strip().lower() not in ("", "identity"):
            raise AskError(
                f"content-encoding is {shown(coding.strip())}: expected identity",
                415,
                {"accept-encoding": "identity"},
            )
    return b"".join(pieces)


def parsed(body: bytes, kind: type[Body]) -> Body:
    """Parse and validate a body. Raises an AskError that names the invalid field."""
    value = _json_of(body)
    if not isinstance(value, dict):
        raise AskError(f"the body is {shown(value)}: expected a JSON object")
    for path, text in _texts_of(value):
        if not _is_utf8(text):
            message = f"{path} is {shown(text)!a}: expected text that UTF-8 can hold"
            is_value = not path.startswith(("a name in ", "the body"))
            raise AskError(message, param=path if is_value else None)
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _ask_error(error) from None


def _ask_error(error: ValidationError) -> AskError:
    """Return an error that names the first invalid field and the expected value.

    The error does not contain the input, which may be large.
    """
    first = error.errors(include_url=False)[0]
    path = "".join(f"[{x}]" if isinstance(x, int) else f".{x}" for x in first["loc"])
    path = shown(path.removeprefix("."))[1:-1]
    kind, given, context = first["type"], shown(first["input"]), first.get("ctx", {})
    param = path or context.get("param")
    if kind == "extra_forbidden":
        message = f"{path} is {given}: not supported by this server, expected none"
        return AskError(message, param=param, code="unsupported_parameter")
    if kind == "model_type":
        message = f"{path} is {given}: expected an object"
        return AskError(message, param=param, code="invalid_type")
    message = first["msg"]
    if kind == "refused":
        code = context["code"]
    elif kind == "missing":
        code = "missing_required_parameter"
    else:
        code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    between = " " if message.startswith("is ") else ": "
    return AskError(f"{path}{between}{message}" if path else message, param=param, code=code)


def _json_of(body: bytes) -> object:
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise AskError(f"the body is not UTF-8: {error}") from None
    try:
        return json.loads(text, object_pairs_hook=_object_of)
    except json.JSONDecodeError as error:
        raise AskError(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise AskError(f"the body nests too deeply: expected {_MOST_NESTED} levels") from None
    except ValueError:  # truncate integers of over 4,300 digits; field validation rejects them
        return json.loads(
            text, object_pairs_hook=_object_of, parse_int=lambda digits: int(digits[:400])
        )


def _object_of(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name in counts if counts[name] > 1)
        raise AskError(f"the body has {shown(twice)} twice in one object: expected each name once")
    return found


def _texts_of(value: object, path: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield every string in a JSON value, with the names of its enclosing fields."""
    if depth > _MOST_NESTED:
        raise AskError(
            f"{shown(path)[1:-1]} nests too deeply: expected at most {_MOST_NESTED} levels"
        )
    if isinstance(value, str):
        yield path or "the body", value
    elif isinstance(value, dict):
        for name, entry in value.items():
            yield f"a name in {path or 'the body'}", name
            yield from _texts_of(entry, f"{path}.{name}" if path else name, depth + 1)
    elif isinstance(value, list):
        for i, entry in enumerate(value):
            if not isinstance(entry, int):
                yield from _texts_of(entry, f"{path}[{i}]", depth + 1)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
