"""Bodies of requests: bounded, parsed, and checked; what is wrong is told by the name of its field."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from kvcache.checks import shown

T = TypeVar("T")
Asked = TypeVar("Asked", bound=BaseModel)
_MOST_NESTED = 8  # levels of lists and objects; no field has more than four
_MOST_DROPPED = 2**22  # bytes
_MOST_AT_ONCE = 2**16  # bytes or characters that take the event loop a millisecond or so


class AskError(Exception):
    """A request that cannot be served, and why."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


async def apart(size: int, call: Callable[..., T], *args: object) -> T:
    """`call(*args)`, in a thread of its own where what it works on is large."""
    return await asyncio.to_thread(call, *args) if size > _MOST_AT_ONCE else call(*args)


async def read_body(request: Request, most: int) -> bytes:
    """The body. AskError (413) for more than `most` bytes, of which no more is kept than that.

    Some of what is too much is read and dropped: most clients read an answer only when all is sent.
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
    return b"".join(pieces)


def parsed(body: bytes, kind: type[Asked]) -> Asked:
    """The request that a body asks for. AskError that names the field that is wrong."""
    value = _json_of(body)
    for path, text in _texts_of(value):
        if not _is_utf8(text):
            raise AskError(f"{path} is {shown(text)!a}: expected text that UTF-8 can hold")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        # Without the inputs, which may be large; of unions, the first alternative says enough.
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    path = shown(".".join(str(each) for each in first["loc"]))[1:-1]
    raise AskError(f"{path}: {first['msg']}" if path else first["msg"])


def _json_of(body: bytes) -> object:
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise AskError(f"the body is not UTF-8: {error}") from None
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise AskError(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise AskError(f"the body nests too deeply: expected {_MOST_NESTED} levels") from None
    except ValueError:  # an integer of more than 4,300 digits, which its field refuses
        return json.loads(text, parse_int=lambda digits: int(digits[:400]))


def _texts_of(value: object, path: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Every string of a JSON value, with the names of the fields that lead to it."""
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
