# SPDX-License-Identifier: Apache-2.0
"""Mooncake's traces (FAST'25): JSON lines that identify content by block ids.

Fields are `timestamp` (ms), `input_length`, `output_length` (tokens) and `hash_ids`, one per block
of the prompt. The last block may be partial. Mooncake's blocks have 512 tokens. Other traces in
this format use a different power of two, from 16 to 4,096, which is inferred from the first lines.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator

import numpy as np

from kvcache_lab.traces.block_ids import MAX_BLOCK_ID, MAX_PROMPT_TOKENS, request_of_ids
from kvcache_lab.traces.fields import (
    Line,
    TraceError,
    count,
    milliseconds,
    quoted,
    record_of,
    whole_numbers,
)
from kvcache_lab.traces.registry import read_trace, register_trace_form
from kvcache_lab.workload import WorkloadRequest

_SIZES = (512, 16, 32, 64, 128, 256, 1024, 2048, 4096)  # tokens per block, most probable first
_NUM_LOOKED_AT = 64  # number of lines from which the block size is inferred


def read_mooncake(path: str | os.PathLike) -> Iterator[WorkloadRequest]:
    """Read a trace of this format, as `read_trace` does."""
    return read_trace(path, "mooncake")


@register_trace_form(
    "mooncake", lambda line, record: record is not None and record.keys() >= {"hash_ids"}
)
def _read(lines: Iterator[Line]) -> Iterator[WorkloadRequest]:
    first = list(itertools.islice(lines, _NUM_LOOKED_AT))
    size = _block_size(first)
    for index, line in enumerate(itertools.chain(first, lines)):
        record = record_of(line)
        arrival = milliseconds(record, "timestamp", line)
        length = count(record, "input_length", 1, line, most=MAX_PROMPT_TOKENS)
        output_length = count(record, "output_length", 0, line)
        ids = np.array(whole_numbers(record, "hash_ids", MAX_BLOCK_ID, line), np.int64)
        expected = -(-length // size)
        if len(ids) != expected:
            raise TraceError(
                f"{line.where}: hash_ids has {len(ids)} entries: expected {quoted(expected)}, one per "
                f"{size} tokens of input_length {quoted(length)}"
            )
        yield request_of_ids(index, arrival, length, output_length, ids, size)


def _block_size(lines: list[Line]) -> int:
    """Return the number of tokens per block that is consistent with the most lines."""
    found = []
    for line in lines:
        try:
            record = json.loads(line.text)
            length, num = record["input_length"], len(record["hash_ids"])
        except (ValueError, TypeError, KeyError, RecursionError):
            continue  # the reader reports the malformed line
        if type(length) is int:
            found.append((length, num))
    return max(_SIZES, key=lambda size: sum(-(-length // size) == num for length, num in found))
