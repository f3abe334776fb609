# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM's scheduler with kvcache's allocator:

    vllm serve MODEL --scheduler-cls kvcache_vllm.VllmScheduler

`VllmAsyncScheduler` is the variant for asynchronous scheduling. Pass options with `--additional-config`:

    --additional-config '{"kvcache": {"eviction": "learned"}}'
"""

from __future__ import annotations

from kvcache.lazy import lazy_names
from kvcache_vllm.compatibility import check_version

# Imported on first use, because vLLM imports this package for each plug-in in each of its processes.
_HOME = {
    "VllmAsyncScheduler": "kvcache_vllm.scheduler",
    "VllmCacheManager": "kvcache_vllm.manager",
    "VllmScheduler": "kvcache_vllm.scheduler",
}

__all__ = [*_HOME]  # noqa: PLE0604

_imported, __dir__ = lazy_names(__name__, _HOME)


def __getattr__(name: str) -> object:
    if name in _HOME:
        check_version()  # before imports from vLLM that may fail in other versions
    return _imported(name)
