# SPDX-License-Identifier: Apache-2.0
"""Entry point of vLLM's general plug-ins: switches on the sanitizer in each worker process.

    KVCACHE_SANITIZE=1 vllm serve MODEL

Without the variable, nothing of vLLM is imported or changed.
"""

from __future__ import annotations

import functools
import logging
import os

_log = logging.getLogger("kvcache.sanitizer")


def register() -> None:
    """Observe the model runner of each worker that this process creates, if KVCACHE_SANITIZE is set."""
    if os.environ.get("KVCACHE_SANITIZE", "") in ("", "0"):
        return
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    original = WorkerWrapperBase.initialize_from_config
    if hasattr(original, "__wrapped__"):  # vLLM loads its plug-ins several times
        return

    @functools.wraps(original)
    def initialize_from_config(wrapper: WorkerWrapperBase, *arguments: object) -> object:
        result = original(wrapper, *arguments)
        try:
            from kvcache.plugins.vllm.sanitizing import observe

            observe(wrapper.worker)
        except Exception as failure:  # the engine runs without the sanitizer
            _log.error("The KV cache sanitizer is off: %s", failure)
        return result

    WorkerWrapperBase.initialize_from_config = initialize_from_config
