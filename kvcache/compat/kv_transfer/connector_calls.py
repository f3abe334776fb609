# SPDX-License-Identifier: Apache-2.0
"""What a connector is asked, and what a scheduler step tells it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvcache.checks import instances, shown
from kvcache.layouts import choose_layout
from kvcache.specs import GroupSpec


def get_kv_connector_cache_layout(connector: object = None, vllm_config: object = None) -> str:
    """Return the cache layout that a connector requires, "HND" or "NHD".

    Args:
        connector: A connector or its class, with a method `get_required_kvcache_layout(vllm_config)`;
            the name of a layout; or None.
        vllm_config: Passed to the connector.

    Returns:
        "NHD" if nothing is required. This is logged once.

    Raises:
        TypeError: `connector` is of another type.
        ValueError: The layout is unknown.

    Example:
        >>> get_kv_connector_cache_layout("HND"), get_kv_connector_cache_layout()
        ('HND', 'NHD')
    """
    if connector is None or isinstance(connector, str):
        return choose_layout(connector)
    ask = getattr(connector, "get_required_kvcache_layout", None)
    if not callable(ask):
        raise TypeError(
            f"connector is {shown(connector)}: expected an object with get_required_kvcache_layout, "
            "a layout or None"
        )
    return choose_layout(
        {getattr(connector, "__name__", type(connector).__name__): ask(vllm_config)}
    )


def yield_req_data(
    scheduler_output: Any, groups: Sequence[GroupSpec] | None = None
) -> Iterator[tuple[Any, Any, bool]]:
    """Yield the new block ids of every request in a step. New requests are yielded first.

    Args:
        scheduler_output: An object with `scheduled_new_reqs`, a sequence of objects with `req_id` and
            `block_ids`, and `scheduled_cached_reqs`, an object with `req_ids`, `new_block_ids` (one entry
            per request) and `resumed_req_ids`.
        groups: The manager's cache groups. The block ids of groups with `transferred=False` are replaced
            by an empty list. None: the ids of all groups are returned.

    Yields:
        `(req_id, new_block_id_groups, resumed)`. `new_block_id_groups` has one sequence of block ids per
        cache group, or is None if no blocks were allocated. `resumed` is False for new requests.

    Raises:
        ValueError: `req_ids` and `new_block_ids` differ in length (raised before the first item), or the
            number of groups for which a request has block ids differs from `len(groups)`.

    Example:
        >>> from types import SimpleNamespace as Some
        >>> cached = Some(req_ids=["b", "c"], new_block_ids=[([4],), ([5],)], resumed_req_ids={"c"})
        >>> step = Some(
        ...     scheduled_new_reqs=[Some(req_id="a", block_ids=([1, 2],))], scheduled_cached_reqs=cached
        ... )
        >>> list(yield_req_data(step))
        [('a', ([1, 2],), False), ('b', ([4],), False), ('c', ([5],), True)]
    """
    if groups is not None:
        groups = instances(groups, GroupSpec, "groups")
    try:
        new, cached = scheduler_output.scheduled_new_reqs, scheduler_output.scheduled_cached_reqs
    except AttributeError as error:
        raise TypeError(
            f"scheduler_output is {shown(scheduler_output)}: expected an object with "
            "scheduled_new_reqs and scheduled_cached_reqs"
        ) from error
    for name in ("req_ids", "new_block_ids"):
        if not hasattr(cached, name):
            raise TypeError(
                f"scheduled_cached_reqs is {shown(cached)}: expected an object with {name}"
            )
    if len(cached.req_ids) != len(cached.new_block_ids):
        raise ValueError(
            f"req_ids of scheduled_cached_reqs has {len(cached.req_ids)} entries, but new_block_ids "
            f"has {len(cached.new_block_ids)}: expected equal lengths"
        )
    entries = _entries(new, cached)
    if groups is None or all(group.transferred for group in groups):
        return entries
    return ((req_id, _transferred(ids, groups), resumed) for req_id, ids, resumed in entries)


def _entries(new: Any, cached: Any) -> Iterator[tuple[Any, Any, bool]]:
    for request in new:
        yield request.req_id, request.block_ids, False
    for req_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
        yield req_id, block_ids, req_id in cached.resumed_req_ids


def _transferred(
    block_ids: Sequence[Any] | None, groups: Sequence[GroupSpec]
) -> tuple[Any, ...] | None:
    if block_ids is None:
        return None
    if len(block_ids) != len(groups):
        raise ValueError(
            f"a request has block ids of {len(block_ids)} groups: expected {len(groups)}, one per "
            "entry of groups"
        )
    return tuple(ids if group.transferred else [] for ids, group in zip(block_ids, groups))
