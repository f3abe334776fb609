# SPDX-License-Identifier: Apache-2.0
"""Request logs of engines: vLLM (`--enable-log-requests`) and SGLang (`--log-requests`).

Other lines are skipped. In vLLM logs, each request line with `prompt_token_ids: [...]` is a
request; newer versions write these lines only at level DEBUG. In SGLang logs, each line `Receive:
obj=GenerateReqInput(...)` is a request. Its tokens are its `input_ids` or, if these are missing,
the words of its `text`. The log level must include complete prompts. Arrival times, in seconds, are
the timestamps at the start of the lines, if any. Answer lengths are unknown.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from datetime import datetime

import numpy as np

from kvcache.checks import MAX_INT32
from kvcache_lab.content import prefix_keys
from kvcache_lab.traces.fields import Line, TraceError, quoted
from kvcache_lab.traces.registry import register_trace_form
from kvcache_lab.traces.text import tokens_of_text
from kvcache_lab.workload import WorkloadRequest

_IDS = r"\[([0-9, ]*)\]"
_VLLM_REQUEST = re.compile(r"Received request \S|Request \S")
_VLLM_IDS = re.compile(rf"\bprompt_token_ids: {_IDS}")
_SGLANG = re.compile(r"Receive: obj=GenerateReqInput\(")
_SGLANG_IDS = re.compile(rf"\binput_ids={_IDS}")
_SGLANG_TEXT = re.compile(r"\btext=('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")")
_MOST_DIGITS = 20
_TIME = re.compile(r"(?:\d\d(\d\d)-)?(\d\d-\d\d \d\d:\d\d:\d\d)")


def _vllm_ids(line: Line) -> re.Match[str] | None:
    """Return the ids in a request line: the last match, because a prompt may contain similar text.

    The search uses several steps, because a single regular expression would try every pair of
    colons in the line.
    """
    text = _decoded(line)
    request = _VLLM_REQUEST.search(text)
    colon = -1 if request is None else text.find(": ", request.end())
    if colon < 0:
        return None
    return max(_VLLM_IDS.finditer(text, colon + 2), key=re.Match.start, default=None)


@register_trace_form("vllm_log", lambda line, record: _vllm_ids(line) is not None)
def _read_vllm(lines: Iterator[Line]) -> Iterator[WorkloadRequest]:
    found = ((line, _vllm_ids(line)) for line in lines)
    yield from _requests((line, _ids(line, each[1])) for line, each in found if each is not None)


@register_trace_form("sglang_log", lambda line, record: _SGLANG.search(_decoded(line)) is not None)
def _read_sglang(lines: Iterator[Line]) -> Iterator[WorkloadRequest]:
    def prompts() -> Iterator[tuple[Line, np.ndarray]]:
        for line in lines:
            text = _decoded(line)
            if _SGLANG.search(text) is None:
                continue
            ids, words = _SGLANG_IDS.search(text), _SGLANG_TEXT.search(text)
            if ids is not None:
                yield line, _ids(line, ids[1])
            elif words is not None:
                yield line, tokens_of_text(_literal(line, words[1]))
            else:
                raise TraceError(
                    f"{line.where}: has neither input_ids nor text: expected a log with prompts "
                    "(--log-requests-level 3)"
                )

    yield from _requests(prompts())


def _decoded(line: Line) -> str:
    return line.text.decode(errors="replace")


def _ids(line: Line, text: str) -> np.ndarray:
    return np.array([_token(line, each) for each in text.split(",") if each.strip()], np.int32)


def _token(line: Line, text: str) -> int:
    digits = text.strip()
    if not digits.isdecimal():
        raise TraceError(f"{line.where}: has token {quoted(digits)}: expected a whole number")
    if len(digits) > _MOST_DIGITS or int(digits) > MAX_INT32:
        raise TraceError(f"{line.where}: has token {digits[:40]}: expected at most {MAX_INT32}")
    return int(digits)


def _literal(line: Line, text: str) -> str:
    """Return the value of a Python string literal."""
    try:
        with warnings.catch_warnings():  # about unknown escapes, which Python prints
            warnings.simplefilter("ignore")
            return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        raise TraceError(
            f"{line.where}: text is {quoted(text)}: expected a string in Python's syntax"
        ) from None


def _requests(prompts: Iterator[tuple[Line, np.ndarray]]) -> Iterator[WorkloadRequest]:
    index, first, arrival = 0, None, 0
    for line, tokens in prompts:
        if len(tokens) == 0:
            continue
        time = _time(line)
        first = time if first is None else first
        if time is not None and first is not None:
            arrival = max(arrival, round(1000 * (time - first).total_seconds()))
        yield WorkloadRequest(index, arrival, tokens, 0, prefix_keys(tokens))
        index += 1


def _time(line: Line) -> datetime | None:
    """Return the timestamp of a line, or None if it has none. vLLM omits the year."""
    found = _TIME.search(_decoded(line)[:80])
    if found is None:
        return None
    try:
        return datetime.strptime(f"20{found[1] or '00'}-{found[2]}", "%Y-%m-%d %H:%M:%S")
    except ValueError:
        return None
