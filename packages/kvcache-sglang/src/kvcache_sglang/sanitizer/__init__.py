# SPDX-License-Identifier: Apache-2.0
"""The sanitizer for SGLang, loaded as a general plug-in:

    KVCACHE_SANITIZE=1 sglang serve MODEL

Without the variable, the plug-in neither imports nor changes any part of SGLang.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

_SCHEDULER = "sglang.srt.managers.scheduler"


def register() -> None:
    """Observe the scheduler that this process runs, if KVCACHE_SANITIZE is set."""
    if os.environ.get("KVCACHE_SANITIZE", "") in ("", "0"):
        return
    # SGLang loads plug-ins in each of its processes. Only processes that run a scheduler have
    # imported it.
    module = sys.modules.get(_SCHEDULER)
    if module is None:
        return
    from kvcache_exchange.plugins.wrapping import wrap_once

    wrap_once(module.Scheduler, "run_event_loop", _observed)
    wrap_once(module.Scheduler, "get_internal_state", _with_findings)


def _observed(original: Callable) -> Callable:
    @functools.wraps(original)
    def run_event_loop(scheduler: Any) -> None:
        from kvcache_exchange.plugins.wrapping import start_observer

        start_observer(lambda: _observe(scheduler))
        original(scheduler)

    return run_event_loop


def _observe(scheduler: Any) -> None:
    from kvcache_sglang.sanitizer.observer import observe

    observe(scheduler)


def _with_findings(original: Callable) -> Callable:
    @functools.wraps(original)
    def get_internal_state(scheduler: Any, request: Any) -> Any:
        output = original(scheduler, request)
        observer = getattr(scheduler, "kvcache_sanitizer", None)
        if observer is not None:
            output.internal_state["kvcache_sanitizer"] = observer.findings()
        return output

    return get_internal_state


def findings(server_info: dict[str, Any]) -> list[dict[str, object]]:
    """Return the findings of an engine's sanitizers, one entry per data-parallel rank.

    With tensor or pipeline parallelism, SGLang queries only the first rank. The other ranks log
    their findings.

    Args:
        server_info: `Engine.get_server_info()`, or the JSON of a server's `/server_info`.

    Returns:
        "reports": pages of text. "counts": findings by kind. "steps", "slots_read",
        "slots_compared", "slots_written": totals. "unchecked": parts of the cache that are not
        checked, each with the reason. "off": the reason why the sanitizer has disabled itself, or None.
        "pages_loaded": pages that HiCache copied from the host.

    Raises:
        ValueError: The engine has no sanitizer.
    """
    found = [
        state["kvcache_sanitizer"]
        for state in server_info.get("internal_states", ())
        if "kvcache_sanitizer" in state
    ]
    if not found:
        raise ValueError("the engine has no sanitizer: expected KVCACHE_SANITIZE=1 at startup")
    return found
