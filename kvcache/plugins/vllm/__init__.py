# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM's scheduler with kvcache's allocator:

    vllm serve MODEL --scheduler-cls kvcache.plugins.vllm.VllmScheduler

`VllmAsyncScheduler` is the variant for asynchronous scheduling. Pass options with `--additional-config`:

    --additional-config '{"kvcache": {"eviction": "learned"}}'
"""

from kvcache.plugins.vllm.compatibility import check_version

check_version()  # before imports from vLLM that may fail in other versions

from kvcache.plugins.vllm.manager import VllmCacheManager  # noqa: E402
from kvcache.plugins.vllm.scheduler import VllmAsyncScheduler, VllmScheduler  # noqa: E402

__all__ = ["VllmAsyncScheduler", "VllmCacheManager", "VllmScheduler"]
