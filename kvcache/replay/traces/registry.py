"""Forms of traces by name, and the one that a file has."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvcache.replay.traces.fields import Line, TraceError
from kvcache.replay.workload import WorkloadRequest

Reader = Callable[[Iterator[Line]], Iterator[WorkloadRequest]]
_MOST_LOOKED_AT = 10_000  # lines of a log, before the first request


class _Form(NamedTuple):
    read: Reader
    has: Callable[[Line, dict | None], bool]


_FORMS: dict[str, _Form] = {}


def register(name: str, has: Callable[[Line, dict | None], bool]) -> Callable[[Reader], Reader]:
    """Registers a reader. It gets the lines that are not blank, and yields their requests.

    `has`: whether a line, and the JSON object that it holds (None: none), shows that a file is of this
    form. ValueError for a name that is registered already.
    """

    def registered(read: Reader) -> Reader:
        if name in _FORMS:
            raise ValueError(f"name is {name!r}: expected one that is not registered yet")
        _FORMS[name] = _Form(read, has)
        return read

    return registered


def trace_forms() -> list[str]:
    """The names of all forms."""
    return sorted(_FORMS)


def read_trace(path: str | os.PathLike, form: str | None = None) -> Iterator[WorkloadRequest]:
    """The requests of a file, read line by line; blank lines are skipped.

    `form`: one of `trace_forms()`; None: the one that its first lines show, Mooncake's where none does.

    Raises TraceError when a malformed line is reached, ValueError for a form that there is not, OSError
    when the file cannot be read.

    >>> next(read_trace("mooncake_conversation.jsonl")).num_tokens  # doctest: +SKIP
    6758
    """
    if form is not None and form not in _FORMS:
        raise ValueError(f"form is {form!r}: expected one of {', '.join(trace_forms())}")
    return _requests(path, form)


def _requests(path: str | os.PathLike, form: str | None) -> Iterator[WorkloadRequest]:
    with open(path, "rb") as file:
        name = os.fspath(path)
        numbered = enumerate(file, 1)
        lines = (Line(text, f"{name}, line {n}") for n, text in numbered if not text.isspace())
        if form is None:
            form, lines = _shown(lines)
        found = False
        for request in _FORMS[form].read(lines):
            found = True
            yield request
        if not found and form.endswith("_log"):
            raise TraceError(f"{name}: has no request: expected a log of form {form!r} with some")


def _shown(lines: Iterator[Line]) -> tuple[str, Iterator[Line]]:
    """The form that lines show, and the lines again."""
    seen: list[Line] = []
    for line in itertools.islice(lines, _MOST_LOOKED_AT):
        seen.append(line)
        record = _object(line)
        for name, form in _FORMS.items():
            if form.has(line, record):
                return name, itertools.chain(seen, lines)
        if line.text.lstrip().startswith((b"{", b"[{")):
            break  # no log begins so
    return "mooncake", itertools.chain(seen, lines)


def _object(line: Line) -> dict | None:
    try:
        record = json.loads(line.text.decode())
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
