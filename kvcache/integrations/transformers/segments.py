"""The parts of a request's tokens that are computed in one call, where states are kept between them."""

from __future__ import annotations

from typing import NamedTuple

from kvcache.serving.batch import Batch


class Segment(NamedTuple):
    """Tokens [first, stop) of the line of a batch's tokens; `start` tokens of the request are before.

    `before`, `after`: which of the request's state pages holds the state before and after them; `before`
    None: of a request without a token yet.
    """

    first: int
    stop: int
    start: int
    before: int | None
    after: int


def segments_of(batch: Batch, request: int, *, has_states: bool, resumes: bool) -> list[Segment]:
    """The segments of one request of a batch, in order.

    Without states it is one. With states each draft is one, as the state after it is kept. `resumes`:
    whether the model computes several tokens at once behind a state; if not, each token is one.
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
