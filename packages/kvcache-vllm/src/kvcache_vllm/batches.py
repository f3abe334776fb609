# SPDX-License-Identifier: Apache-2.0
"""Stores the running requests of a step in columns, for steady decode steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, compress
from typing import Any, NamedTuple

import numpy as np
from vllm.v1.request import Request, RequestStatus

from kvcache_vllm import private


class Facts(NamedTuple):
    """The attributes of a request that do not change while it runs.

    `facts_of` returns None for a streaming session, because its attributes change.
    """

    request: Request
    request_id: str
    all_token_ids: list[int]
    output_token_ids: list[int]
    num_prompt_tokens: int
    most_tokens: int  # number of tokens at which the request stops
    client_index: int
    hash_span: (
        tuple[int, int] | None
    )  # tokens per hashed block, and lookahead; None: unknown hasher
    stops: tuple[int | None, ...]  # token IDs at which the request may stop
    is_watched: bool  # any token may stop the request (repetition detection)


def facts_of(request: Request) -> Facts | None:
    """Return the facts of a request, or None if it needs vLLM's own code."""
    params, hasher = request.sampling_params, private.block_hasher(request)
    if (
        type(request) is not Request
        or params is None
        or request.pooling_params is not None
        or request.structured_output_request is not None
        or request.mm_features
        or request.resumable
        or request.streaming_queue is not None
        or request.trace_headers is not None
        or request.spec_decode_metrics is not None
    ):
        return None
    return Facts(
        request,
        request.request_id,
        private.token_ids(request),
        private.output_token_ids(request),
        request.num_prompt_tokens,
        request.num_prompt_tokens + request.max_tokens,
        request.client_index,
        (0, 0) if hasher is None else getattr(hasher, "span", None),
        (params.eos_token_id, *(params.stop_token_ids or ())),
        params.repetition_detection is not None,
    )


class SteadyBatch:
    """The requests of a step, with one column per attribute.

    `checked`: the epoch in which every attribute of every request was last checked.
    """

    def __init__(self, columns: Sequence[list[Any]], checked: int = -1) -> None:
        self.columns, self.checked = columns, checked
        self.requests, self.ids, self.all_ids, self.output_ids, *rest = columns
        self.num_prompt_tokens, self.most_tokens, self.client_indices, *rest = rest
        spans, stops, watched = rest
        self.limits = np.array(self.most_tokens, np.int64)
        self.from_outputs = 1 - np.array(self.num_prompt_tokens, np.int64)
        self.statuses = [RequestStatus.RUNNING] * len(self.ids)
        self.positions = list(range(len(self.ids)))
        self.is_one_client = len(set(self.client_indices)) == 1
        self.hash_span = spans[0] if len(set(spans)) == 1 else None
        self.stops = frozenset(chain.from_iterable(set(stops)))
        self.watched = [i for i, is_watched in enumerate(watched) if is_watched]
        self.num_scheduled = dict.fromkeys(self.ids, 1)

    def where(self, mask: Iterable[bool]) -> SteadyBatch:
        """Return the batch of the requests that are marked in `mask`."""
        return SteadyBatch([list(compress(column, mask)) for column in self.columns], self.checked)

    def extended(self, facts: Sequence[Facts]) -> SteadyBatch:
        """Return the batch with additional requests appended."""
        return SteadyBatch([[*column, *more] for column, more in zip(self.columns, zip(*facts))])

    def num_tokens(self) -> np.ndarray:
        """Return the number of known tokens of each request as int64[n]."""
        return np.fromiter(map(len, self.all_ids), np.int64, len(self.ids))


NOBODY = SteadyBatch([[] for _ in Facts._fields])
