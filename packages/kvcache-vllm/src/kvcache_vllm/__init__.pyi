# SPDX-License-Identifier: Apache-2.0
"""Public names, for type checkers. `__init__.py` imports each name on first use."""

from kvcache_vllm.manager import VllmCacheManager as VllmCacheManager
from kvcache_vllm.scheduler import VllmAsyncScheduler as VllmAsyncScheduler
from kvcache_vllm.scheduler import VllmScheduler as VllmScheduler
