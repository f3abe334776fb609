# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM's scheduler with kvcache's allocator:

    vllm serve MODEL --scheduler-cls kvcache_vllm.VllmScheduler

`VllmAsyncScheduler` is the variant for asynchronous scheduling. Pass options with `--additional-config`:

    --additional-config '{"kvcache": {"eviction": "learned"}}'
"""

from kvcache_vllm.compatibility import check_version

check_version()  # before imports from vLLM that may fail in other versions

from kvcache_vllm.manager import VllmCacheManager
from kvcache_vllm.scheduler import VllmAsyncScheduler, VllmScheduler

__all__ = ["VllmAsyncScheduler", "VllmCacheManager", "VllmScheduler"]
