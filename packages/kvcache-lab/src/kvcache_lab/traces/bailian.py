# SPDX-License-Identifier: Apache-2.0
"""Alibaba's traces of Qwen on Bailian: JSON lines that identify content by ids of 16-token blocks.

Fields are `chat_id`, `timestamp` (seconds), `input_length`, `output_length` (tokens) and `hash_ids`, one
per block of the prompt. If a partial last block has no id, its tokens are treated as unique.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvcache_lab.traces.block_ids import MAX_BLOCK_ID, MAX_PROMPT_TOKENS, request_of_ids
from kvcache_lab.traces.fields import (
    Line,
    TraceError,
    count,
    quoted,
    record_of,
    seconds,
    whole_numbers,
)
from kvcache_lab.traces.registry import register_trace_form
from kvcache_lab.workload import WorkloadRequest

_NUM_TOKENS = 16  # tokens per block


def _is_bailian(_: Line, record: dict | None) -> bool:
    return record is not None and record.keys() >= {"hash_ids", "chat_id"}


@register_trace_form("bailian", _is_bailian)
def _read(lines: Iterator[Line]) -> Iterator[WorkloadRequest]:
    for index, line in enumerate(lines):
        record = record_of(line)
        arrival = seconds(record, "timestamp", line)
        length = count(record, "input_length", 1, line, most=MAX_PROMPT_TOKENS)
        output_length = count(record, "output_length", 0, line)
        ids = np.array(whole_numbers(record, "hash_ids", MAX_BLOCK_ID, line), np.int64)
        num_full, has_rest = length // _NUM_TOKENS, length % _NUM_TOKENS > 0
        if len(ids) not in (num_full, num_full + has_rest):
            raise TraceError(
                f"{line.where}: hash_ids has {len(ids)} entries: expected {quoted(num_full)}"
                f"{f' or {quoted(num_full + 1)}' if has_rest else ''}, one per {_NUM_TOKENS} tokens of "
                f"input_length {quoted(length)}"
            )
        if len(ids) * _NUM_TOKENS < length:
            ids = np.append(ids, MAX_BLOCK_ID - index)
        yield request_of_ids(index, arrival, length, output_length, ids, _NUM_TOKENS)
