"""Reads the requests of a scheduler's step and their new blocks."""

from __future__ import annotations

from collections.abc import Iterator


def yield_req_data(scheduler_output: object) -> Iterator[tuple]:
    """`(req_id, new_block_id_groups, resumed)` of every request of a step, new ones first.

    scheduler_output: any object with `scheduled_new_reqs`, of objects with `req_id` and `block_ids`, and
    `scheduled_cached_reqs`, one object with `req_ids`, `new_block_ids` (one entry per request) and
    `resumed_req_ids`. A new request is not resumed. Block ids are passed on unchanged: one sequence per
    cache group, or None where a request got none.

    ValueError, before anything is yielded, where req_ids and new_block_ids differ in length.

    >>> from types import SimpleNamespace as Some
    >>> cached = Some(req_ids=["b", "c"], new_block_ids=[([4],), ([5],)], resumed_req_ids={"c"})
    >>> step = Some(
    ...     scheduled_new_reqs=[Some(req_id="a", block_ids=([1, 2],))], scheduled_cached_reqs=cached
    ... )
    >>> list(yield_req_data(step))
    [('a', ([1, 2],), False), ('b', ([4],), False), ('c', ([5],), True)]
    """
    new, cached = scheduler_output.scheduled_new_reqs, scheduler_output.scheduled_cached_reqs
    if len(cached.req_ids) != len(cached.new_block_ids):
        raise ValueError(
            f"scheduled_cached_reqs has {len(cached.req_ids)} req_ids, "
            f"{len(cached.new_block_ids)} new_block_ids: expected the same number"
        )
    return _entries(new, cached)


def _entries(new: object, cached: object) -> Iterator[tuple]:
    for request in new:
        yield request.req_id, request.block_ids, False
    for req_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
        yield req_id, block_ids, req_id in cached.resumed_req_ids
