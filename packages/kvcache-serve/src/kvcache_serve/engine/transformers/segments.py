# SPDX-License-Identifier: Apache-2.0
"""Splits a request's tokens into segments, so that the states between segments can be kept.

Each segment is computed in one call of the model.
"""

from __future__ import annotations

from typing import NamedTuple

from kvcache_serve.engine.batch import Batch


class Segment(NamedTuple):
    """Tokens [first, stop) of a batch. They follow the first `start` tokens of the request.

    `before`, `after`: indices, in the request's state pages, of the state before and after the segment.
    `before` is None if the segment begins with the request's first token.
    """

    first: int
    stop: int
    start: int
    before: int | None
    after: int


def segments_of(batch: Batch, request: int, *, has_states: bool, resumes: bool) -> list[Segment]:
    """Return the segments of one request of a batch, in order.

    Without states, there is one segment. With states, each draft is a separate segment, because the
    state after each draft is kept. `resumes` is True if the model can process several tokens at once
    from an existing state. If False, each token is a separate segment.
    """
    first, stop = (int(x) for x in batch.query_start_loc[request : request + 2])
    start = int(batch.starts[request])
    if not has_states:
        return [Segment(first, stop, start, None, 0)]
    num_drafts = int(batch.num_drafts[request])
    known = stop - num_drafts
    segments = []
    step = known - first if resumes or start == 0 else 1
    for at in range(first, known, step):
        before = None if start == 0 else 0
        segments.append(Segment(at, at + step, start + at - first, before, 0))
    for draft in range(num_drafts):
        at = known + draft
        segments.append(Segment(at, at + 1, start + at - first, draft, draft + 1))
    return segments
