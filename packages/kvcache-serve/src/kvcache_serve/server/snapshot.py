# SPDX-License-Identifier: Apache-2.0
"""A snapshot of the cache and the engine as JSON-compatible values."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvcache.sources import KVSource
from kvcache_serve.engine import Engine, State, pool_states

_MAX_SEQUENCES = 200  # maximum number of sequences to list


def snapshot(engine: Engine) -> dict[str, Any]:
    """Return hits, counters, the number of blocks by state in each pool, and the blocks of each
    sequence.

    Must be called in the engine's thread.
    """
    manager, scheduler = engine.cache.manager, engine.scheduler
    stats = manager.cache.stats
    host = manager.host_pool
    sequences = [*scheduler.admitted, *scheduler.waiting]
    return {
        "pool": pool_states(manager)._asdict(),
        "host": None if host is None else pool_states(manager, "cpu")._asdict(),
        "page_bytes": engine.cache.plan.page_bytes,
        "hit_rate": stats.hit_rate,
        "recent_hit_rate": stats.recent.hit_rate,
        "evicted": manager.pool.num_evicted,
        "host_evicted": 0 if host is None else host.num_evicted,
        "eviction": manager.options.eviction,
        "metrics": engine.metrics.as_dict(),
        "hints": asdict(engine.hints.stats)
        | {"pending": engine.hints.num_pending, "pinned_blocks": engine.hints.num_pinned_blocks},
        "sanitizer": _sanitizer(engine),
        "sources": [_source(source) for source in engine.sources],
        "num_sequences": len(sequences),
        "sequences": [_sequence(engine, each) for each in sequences[:_MAX_SEQUENCES]],
    }


def _sanitizer(engine: Engine) -> dict[str, Any]:
    sanitizer = engine.sanitizer
    if sanitizer is None:
        return {"mode": "off", "counts": {}}
    return {
        "mode": sanitizer.mode,
        "counts": dict(sanitizer.counts),
        "slots_read": sanitizer.slots_read,
        "slots_written": sanitizer.slots_written,
    }


def sanitizer_reports(engine: Engine, state: dict[str, Any]) -> dict[str, Any]:
    """Return the sanitizer's counts from a snapshot, and its reports. Thread-safe."""
    sanitizer = engine.sanitizer
    reports = [] if sanitizer is None else [asdict(each) for each in sanitizer.reports[:]]
    return state["sanitizer"] | {"reports": reports}


def _source(source: KVSource) -> dict[str, Any]:
    return {
        "name": source.name,
        "loading_requests": source.num_loading_requests,
        "quarantined_blocks": source.num_quarantined_blocks,
        "counts": asdict(source.stats),
    }


def _sequence(engine: Engine, sequence: Any) -> dict[str, Any]:
    manager = engine.cache.manager
    has_row = sequence.state in (State.RUNNING, State.SWAPPED)
    num_blocks = 0
    if sequence.state in (State.RUNNING, State.LOADING):
        groups = range(len(manager.groups))
        num_blocks = sum(
            int((manager.block_ids(sequence.request, group) > 0).sum()) for group in groups
        )
    return {
        "id": f"{sequence.generation.request_id}.{sequence.index}",
        "state": sequence.state.value,
        "tokens": sequence.request.num_tokens,
        "computed": manager.num_computed_tokens(sequence.request) if has_row else 0,
        "cached": sequence.num_cached_tokens or 0,
        "loaded": sequence.num_loaded_tokens,
        "blocks": num_blocks,
        "preemptions": sequence.num_preemptions,
    }
