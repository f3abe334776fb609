# SPDX-License-Identifier: Apache-2.0
"""The sanitizer for vLLM, loaded as a general plug-in:

    KVCACHE_SANITIZE=1 vllm serve MODEL

Without the variable, the plug-in neither imports nor changes any part of vLLM.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any


def register() -> None:
    """Observe the model runner of each worker that this process creates, if KVCACHE_SANITIZE is set."""
    if os.environ.get("KVCACHE_SANITIZE", "") in ("", "0"):
        return
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    from kvcache_exchange.plugins.wrapping import wrap_once

    wrap_once(WorkerWrapperBase, "initialize_from_config", _observed)  # vLLM calls `register` often


def _observed(original: Callable) -> Callable:
    @functools.wraps(original)
    def initialize_from_config(wrapper: Any, *arguments: object) -> object:
        from kvcache_exchange.plugins.wrapping import start_observer

        result = original(wrapper, *arguments)
        start_observer(lambda: _observe(wrapper.worker))
        return result

    return initialize_from_config


def _observe(worker: Any) -> None:
    from kvcache_vllm.sanitizer.observer import observe

    try:
        observe(worker)
    except Exception as failure:
        worker.model_runner.kvcache_sanitizer_is_off = str(failure)
        raise


def findings(worker: Any) -> dict[str, object]:
    """Return the findings of a worker's sanitizer, for `LLM.collective_rpc(findings)`.

    Args:
        worker: A worker of vLLM.

    Returns:
        "reports": pages of text. "counts": findings by kind. "steps", "slots_read",
        "slots_compared", "slots_written": totals. "unchecked": groups that are not checked, each
        with the reason. "off": the reason why the sanitizer has disabled itself, or None.
        "blocks_loaded": blocks that a host tier loaded. "loads_checked": loaded blocks whose bytes
        were compared.

    Raises:
        ValueError: The worker has no sanitizer, or the sanitizer does not support the worker. The
            message states the reason.
    """
    runner = worker.model_runner
    observer = getattr(runner, "kvcache_sanitizer", None)
    if observer is None and hasattr(runner, "kvcache_sanitizer_is_off"):
        raise ValueError(f"the sanitizer is off: {runner.kvcache_sanitizer_is_off}")
    if observer is None:
        raise ValueError("the worker has no sanitizer: start it with KVCACHE_SANITIZE=1")
    return observer.findings()
