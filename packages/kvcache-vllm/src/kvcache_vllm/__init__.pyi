# SPDX-License-Identifier: Apache-2.0
"""Public names, which `__init__.py` imports on first use."""

from kvcache_vllm.manager import VllmCacheManager as VllmCacheManager
from kvcache_vllm.scheduler import VllmAsyncScheduler as VllmAsyncScheduler
from kvcache_vllm.scheduler import VllmScheduler as VllmScheduler
