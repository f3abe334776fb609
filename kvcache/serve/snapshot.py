"""What the cache and the engine hold at a moment, as plain values for JSON."""

from __future__ import annotations

from typing import Any

from kvcache.serving import Engine, State, pool_states

_MAX_SEQUENCES = 200  # that are listed


def snapshot(engine: Engine) -> dict[str, Any]:
    """Pools by state, hits, counts, and what each sequence holds. Called where the engine is called."""
    manager, scheduler = engine.cache.manager, engine.scheduler
    stats = manager.stats
    host = manager.host_pool
    sequences = [*scheduler.admitted, *scheduler.waiting]
    return {
        "pool": pool_states(manager)._asdict(),
        "host": None if host is None else pool_states(manager, "cpu")._asdict(),
        "block_size": manager.block_size,
        "page_bytes": engine.cache.plan.page_bytes,
        "groups": [
            {"kind": group.kind, "layers": len(group.layers), "block_size": group.block_size}
            for group in engine.cache.plan.groups
        ],
        "hit_rate": stats.hit_rate,
        "recent_hit_rate": stats.recent.hit_rate,
        "evicted": manager.pool.num_evicted,
        "host_evicted": 0 if host is None else host.num_evicted,
        "eviction": manager.options.eviction,
        "metrics": engine.metrics.as_dict(),
        "num_sequences": len(sequences),
        "sequences": [_sequence(engine, each) for each in sequences[:_MAX_SEQUENCES]],
    }


def _sequence(engine: Engine, sequence: Any) -> dict[str, Any]:
    manager = engine.cache.manager
    has_row = sequence.state in (State.RUNNING, State.SWAPPED)
    num_blocks = 0
    if sequence.state is State.RUNNING:
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
        "blocks": num_blocks,
        "preemptions": sequence.num_preemptions,
    }
