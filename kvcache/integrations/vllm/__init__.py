"""vLLM's scheduler over kvcache's allocator:

    vllm serve MODEL --scheduler-cls kvcache.integrations.vllm.Scheduler

`AsyncScheduler` is the one for asynchronous scheduling. Options go by `--additional-config`:

    --additional-config '{"kvcache": {"eviction": "learned"}}'
"""

from kvcache.integrations.vllm.versions import check_version

check_version()  # before anything of vLLM is imported that another version may not have

from kvcache.integrations.vllm.manager import VllmCacheManager  # noqa: E402
from kvcache.integrations.vllm.scheduler import AsyncScheduler, Scheduler  # noqa: E402

__all__ = ["AsyncScheduler", "Scheduler", "VllmCacheManager"]
