# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM's scheduler with kvcache's allocator:

    vllm serve MODEL --scheduler-cls kvcache_vllm.VllmScheduler

`VllmAsyncScheduler` is the variant for asynchronous scheduling. Pass options with `--additional-config`:

    --additional-config '{"kvcache": {"eviction": "learned"}}'
"""

from __future__ import annotations

from kvcache.lazy import lazy_names
from kvcache_vllm.compatibility import check_version

# Names are imported on first use, because vLLM imports this package for each plug-in in each of its
# processes.
_imported, __dir__, __all__ = lazy_names(__name__, __file__)


def __getattr__(name: str) -> object:
    if name in __all__:
        check_version()  # before imports from vLLM that may fail in other versions
    return _imported(name)
