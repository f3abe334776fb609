# SPDX-License-Identifier: Apache-2.0
"""Mooncake's traces (FAST'25): JSON lines, with ids of blocks of 512 tokens as content.

Fields are `timestamp` (ms), `input_length`, `output_length` (tokens) and `hash_ids`, one per block of the
prompt. The last block may be partial.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

import numpy as np

from kvcache.replay.traces.block_ids import MAX_BLOCK_ID, block_content, block_tokens
from kvcache.replay.traces.fields import (
    Line,
    TraceError,
    count,
    milliseconds,
    quoted,
    record_of,
    whole_numbers,
)
from kvcache.replay.traces.registry import read_trace, register_trace_form
from kvcache.replay.workload import WorkloadRequest

_NUM_TOKENS = 512  # per block


def read_mooncake(path: str | os.PathLike) -> Iterator[WorkloadRequest]:
    """Read a trace of this format, as `read_trace` does."""
    return read_trace(path, "mooncake")


@register_trace_form(
    "mooncake", lambda line, record: record is not None and record.keys() >= {"hash_ids"}
)
def _read(lines: Iterator[Line]) -> Iterator[WorkloadRequest]:
    for index, line in enumerate(lines):
        record = record_of(line)
        arrival = milliseconds(record, "timestamp", line)
        length = count(record, "input_length", 1, line, most=math.inf)  # bounded by hash_ids
        output_length = count(record, "output_length", 0, line)
        ids = whole_numbers(record, "hash_ids", MAX_BLOCK_ID, line)
        expected = -(-length // _NUM_TOKENS)
        if len(ids) != expected:
            raise TraceError(
                f"{line.where}: hash_ids has {len(ids)} entries: expected {quoted(expected)}, one per "
                f"{_NUM_TOKENS} tokens of input_length {quoted(length)}"
            )
        blocks = np.array(ids, np.int64)
        tokens = block_tokens(blocks, _NUM_TOKENS).reshape(-1)[:length]
        content = block_content(blocks, _NUM_TOKENS).reshape(-1)[:length]
        yield WorkloadRequest(index, arrival, tokens, output_length, content)
