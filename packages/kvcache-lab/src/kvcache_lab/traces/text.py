# SPDX-License-Identifier: Apache-2.0
"""Traces with text: JSON lines with `prompt`, or with `messages` of `role` and `content`.

Each word and each punctuation mark becomes one token; a real tokenizer yields slightly more tokens.
Equal prefixes remain equal, which is sufficient for a replay. `timestamp` (ms) and `output_length`
(tokens) are optional and must be present in either all lines or none.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator

import numpy as np

from kvcache_lab.content import VOCABULARY, prefix_keys
from kvcache_lab.traces.fields import (
    Line,
    TraceError,
    check_times,
    count,
    field,
    milliseconds,
    quoted,
    record_of,
)
from kvcache_lab.traces.registry import register_trace_form
from kvcache_lab.workload import WorkloadRequest

_WORD = re.compile(r"\w+|[^\w\s]")


def tokens_of_text(text: str) -> np.ndarray:
    """Return one token id below `VOCABULARY` per word or punctuation mark, as int32[n]."""
    words = _WORD.findall(text)
    keys = (zlib.crc32(word.encode(errors="surrogatepass")) for word in words)
    return np.array([key % VOCABULARY for key in keys], np.int32)


def _is_text(_: Line, record: dict | None) -> bool:
    return record is not None and ("prompt" in record or "messages" in record)


@register_trace_form("text", _is_text)
def _read(lines: Iterator[Line]) -> Iterator[WorkloadRequest]:
    has_times = None
    for index, line in enumerate(lines):
        record = record_of(line)
        has_times = check_times(record, line, has_times)
        name = "messages" if "messages" in record else "prompt"
        text = _messages(record, line) if name == "messages" else _text(record, name, line)
        tokens = tokens_of_text(text)
        if len(tokens) == 0:
            raise TraceError(
                f"{line.where}: {name} is {quoted(record[name])}: expected at least one word"
            )
        arrival = milliseconds(record, "timestamp", line) if has_times else 0
        answer = count(record, "output_length", 0, line) if "output_length" in record else 0
        yield WorkloadRequest(index, arrival, tokens, answer, prefix_keys(tokens))


def _text(record: dict, name: str, line: Line) -> str:
    value = field(record, name, line)
    if not isinstance(value, str):
        raise TraceError(f"{line.where}: {name} is {quoted(value)}: expected a string")
    return value


def _messages(record: dict, line: Line) -> str:
    messages = record["messages"]
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise TraceError(
            f"{line.where}: messages is {quoted(messages)}: expected a list of objects with role and "
            "content"
        )
    return "".join(
        f"<{_text(each, 'role', line)}> {_text(each, 'content', line)} </>\n" for each in messages
    )
