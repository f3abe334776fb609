# SPDX-License-Identifier: Apache-2.0
"""Detects runtime weight updates, which invalidate KV computed with earlier weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from kvcache_exchange.plugins.wrapping import is_wrapped, wrap_once

_SOURCES = ("disk", "distributed", "tensor", "ipc")
_before: list[Callable[[], None]] = []
_after: list[Callable[[], None]] = []


def observe_weight_updates(
    after: Callable[[], None], before: Callable[[], None] | None = None
) -> None:
    """Call functions before and after each weight update in this process.

    Takes effect only if `wrap_weight_updates` is called before the scheduler's request dispatcher is
    created: the dispatcher holds bound methods. HiCache's stores are created before the dispatcher.
    """
    wrap_weight_updates()
    _after.append(after)
    if before is not None:
        _before.append(before)


def wrap_weight_updates() -> None:
    """Wrap the methods that update the weights, once per process."""
    from sglang.srt.managers.scheduler_components.weight_updater import (
        SchedulerWeightUpdaterManager,
    )

    for source in _SOURCES:
        wrap_once(SchedulerWeightUpdaterManager, f"update_weights_from_{source}", _observed)


def check_observed(scheduler: Any) -> None:
    """Raise ValueError if a scheduler's dispatcher holds methods that have not been wrapped."""
    for handler in scheduler._request_dispatcher._mapping.values():
        name = getattr(handler, "__name__", "")
        if name.startswith("update_weights_from_") and not is_wrapped(handler, _observed):
            raise ValueError(
                f"SGLang's {name} is not observed: expected the plug-in to be loaded before the "
                "scheduler is created"
            )


def _observed(original: Callable) -> Callable:
    @functools.wraps(original)
    def update_weights(manager: Any, recv_req: Any) -> Any:
        for call in _before:
            call()
        try:
            return original(manager, recv_req)
        finally:  # a failed update may have changed some weights
            for call in _after:
                call()

    return update_weights
