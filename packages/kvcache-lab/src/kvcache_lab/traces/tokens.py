# SPDX-License-Identifier: Apache-2.0
"""Traces with token ids: JSON lines with `token_ids`, `prompt_token_ids` or `input_ids`.

`timestamp` (ms) and `output_length` (tokens) are optional and must be present in all lines or none.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvcache_lab.content import prefix_keys
from kvcache_lab.traces.fields import (
    Line,
    TraceError,
    check_times,
    count,
    milliseconds,
    record_of,
    token_ids,
)
from kvcache_lab.traces.registry import register_trace_form
from kvcache_lab.workload import WorkloadRequest

_NAMES = ("token_ids", "prompt_token_ids", "input_ids")


@register_trace_form(
    "tokens", lambda line, record: record is not None and any(n in record for n in _NAMES)
)
def _read(lines: Iterator[Line]) -> Iterator[WorkloadRequest]:
    has_times = None
    for index, line in enumerate(lines):
        record = record_of(line)
        has_times = check_times(record, line, has_times)
        name = next((each for each in _NAMES if each in record), None)
        if name is None:
            raise TraceError(
                f"{line.where}: token_ids is missing: expected one of {', '.join(_NAMES)}"
            )
        tokens = token_ids(record, name, line)
        arrival = milliseconds(record, "timestamp", line) if has_times else 0
        answer = count(record, "output_length", 0, line) if "output_length" in record else 0
        yield WorkloadRequest(index, arrival, tokens, answer, prefix_keys(tokens))
