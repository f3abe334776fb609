"""Reader of Mooncake traces (FAST'25): JSON lines, one request each, content as block ids.

`timestamp` (ms), `input_length`, `output_length` (tokens), `hash_ids`: one id per 512 tokens of
the prompt, the last block may be partial. Equal ids mean equal content and equal prefix. The trace
holds no tokens: they are made from the ids here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import numpy as np

from kvcache.replay.content import VOCABULARY, mix64
from kvcache.replay.workload import WorkloadRequest

TRACE_BLOCK_TOKENS = 512  # tokens per hash id
_MAX_HASH_ID = VOCABULARY**2 - 1  # two tokens spell an id
_OFFSETS = np.arange(TRACE_BLOCK_TOKENS, dtype=np.int64)
_OFFSET_MIX = mix64(_OFFSETS.astype(np.uint64))


class TraceError(ValueError):
    """A trace line that is malformed; names file, line, field and value."""


def read_mooncake(path: str | os.PathLike) -> Iterator[WorkloadRequest]:
    """The requests of a trace file, read line by line; blank lines are skipped.

    Raises TraceError when a malformed line is reached; OSError when the file cannot be read.

    >>> next(read_mooncake("mooncake_conversation.jsonl")).num_tokens  # doctest: +SKIP
    6758
    """
    name, index = os.fspath(path), 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            yield _request(index, _record(line, f"{name}, line {number}"))
            index += 1


def _record(line: bytes, where: str) -> dict:
    """The checked fields of one line."""
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where}: not JSON ({error}): expected one object per line") from None
    if not isinstance(record, dict):
        raise TraceError(f"{where}: is {_quoted(record)}: expected a JSON object")
    for field, least in (("timestamp", 0), ("input_length", 1), ("output_length", 0)):
        _check_count(record, field, least, where)
    _check_hash_ids(record, where)
    return record


def _field(record: dict, field: str, where: str) -> object:
    if field not in record:
        raise TraceError(f"{where}: {field} is missing: expected it in every line")
    return record[field]


def _check_count(record: dict, field: str, least: int, where: str) -> None:
    value = _field(record, field, where)
    if type(value) is not int or value < least:  # a bool is an int, and no count
        raise TraceError(
            f"{where}: {field} is {_quoted(value)}: expected a whole number of {least} or more"
        )


def _check_hash_ids(record: dict, where: str) -> None:
    ids = _field(record, "hash_ids", where)
    if not isinstance(ids, list):
        raise TraceError(f"{where}: hash_ids is {_quoted(ids)}: expected a list of whole numbers")
    for i, value in enumerate(ids):
        if type(value) is not int or not 0 <= value <= _MAX_HASH_ID:
            raise TraceError(
                f"{where}: hash_ids[{i}] is {_quoted(value)}: "
                f"expected a whole number from 0 to {_MAX_HASH_ID}"
            )
    expected = -(-record["input_length"] // TRACE_BLOCK_TOKENS)
    if len(ids) != expected:
        raise TraceError(
            f"{where}: hash_ids has {len(ids)} entries: expected {_quoted(expected)}, one per "
            f"{TRACE_BLOCK_TOKENS} tokens of input_length {_quoted(record['input_length'])}"
        )


def _quoted(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _request(index: int, record: dict) -> WorkloadRequest:
    ids = np.array(record["hash_ids"], np.int64)
    length = record["input_length"]
    return WorkloadRequest(
        index,
        record["timestamp"],
        block_tokens(ids).reshape(-1)[:length],
        record["output_length"],
        block_content(ids).reshape(-1)[:length],
    )


def block_tokens(hash_ids: np.ndarray) -> np.ndarray:
    """int32[k, 512]: the tokens of the blocks int64[k], all below `VOCABULARY`.

    The first two spell the id, so different ids give different blocks, for certain and for every
    allocation block that begins where they do; the others are a mix of id and offset.
    """
    mixed = mix64(hash_ids.astype(np.uint64))[:, None] ^ _OFFSET_MIX
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    mixed >>= np.uint64(32)
    mixed *= np.uint64(VOCABULARY)  # from [0, 2**32) to [0, VOCABULARY) without a division
    mixed >>= np.uint64(32)
    tokens = mixed.astype(np.int32)
    tokens[:, 0] = hash_ids % VOCABULARY
    tokens[:, 1] = hash_ids // VOCABULARY
    return tokens


def block_content(hash_ids: np.ndarray) -> np.ndarray:
    """int64[k, 512]: content keys `id * 512 + offset` of the blocks int64[k] of one prompt.

    The first token alone does not spell its block's id: two blocks behind the same one may both
    begin with it, and a cache whose blocks have one token, or straddle, rightly hits there. Its key
    is therefore made of the block before and the token, and is negative, unlike all others.
    """
    keys = hash_ids[:, None] * TRACE_BLOCK_TOKENS + _OFFSETS
    before = np.concatenate([[0], hash_ids[:-1] + 1])
    keys[:, 0] = -1 - (before * VOCABULARY + hash_ids % VOCABULARY)
    return keys
