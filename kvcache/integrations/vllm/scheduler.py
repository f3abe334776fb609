"""vLLM's schedulers with kvcache's manager in place of their own."""

from __future__ import annotations

import functools
from typing import Any

from vllm.v1.core.sched import async_scheduler
from vllm.v1.core.sched import scheduler as vllm_scheduler
from vllm.v1.engine import core as engine_core

from kvcache.integrations.vllm.hashing import get_request_block_hasher, hash_bytes_of
from kvcache.integrations.vllm.manager import VllmCacheManager


class _WithManager:
    """A scheduler of vLLM makes its manager by a name of its module: it finds kvcache's there."""

    def __init__(self, vllm_config: Any, *args: Any, **options: Any) -> None:
        # The engine asks for a hasher behind this.
        engine_core.get_request_block_hasher = get_request_block_hasher
        own = (vllm_config.additional_config or {}).get("kvcache", {})
        if not isinstance(own, dict):
            raise ValueError(
                f"additional_config has {own!r} for kvcache: expected options, as "
                '{"kvcache": {"eviction": "learned"}}'
            )
        theirs = vllm_scheduler.KVCacheManager
        vllm_scheduler.KVCacheManager = functools.partial(
            VllmCacheManager,
            hash_bytes=hash_bytes_of(vllm_config.cache_config.prefix_caching_hash_algo),
            options=own,
        )
        try:
            super().__init__(vllm_config, *args, **options)
        finally:
            vllm_scheduler.KVCacheManager = theirs
        # Chunks of a prompt end where a state is kept. What the worker keeps of a chunk's inside goes
        # to the null block.
        self.mamba_has_prefill_checkpoint_blocks = False
        if self.connector is not None and self.kv_cache_manager.copies_states:
            raise ValueError(
                "kv_transfer_config is given, and the model keeps states that are copied "
                "(mamba_cache_mode 'align'): kvcache's scheduler for vLLM supports one of them; leave "
                "out the connector, or serve with vLLM's own scheduler"
            )
        self.kv_cache_manager.ask_who_waits(lambda: bool(self.waiting))


class Scheduler(_WithManager, vllm_scheduler.Scheduler):
    """vLLM's scheduler over kvcache."""


class AsyncScheduler(_WithManager, async_scheduler.AsyncScheduler):
    """vLLM's scheduler for asynchronous scheduling over kvcache."""
