# SPDX-License-Identifier: Apache-2.0
"""Runtime weight updates, after which KV of the previous weights must not be used."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from kvcache.plugins.wrapping import wrap_once

_UPDATES = ("disk", "distributed", "tensor", "ipc")
_observers: list[WeightObserver] = []


class WeightObserver(Protocol):
    """An object that holds KV of the current weights."""

    def before_weight_update(self) -> None: ...

    def after_weight_update(self) -> None: ...


def observe_weight_updates(observer: WeightObserver) -> None:
    """Call an observer before and after each update of the weights in this process."""
    from sglang.srt.managers.scheduler_components.weight_updater import (
        SchedulerWeightUpdaterManager,
    )

    for source in _UPDATES:
        wrap_once(SchedulerWeightUpdaterManager, f"update_weights_from_{source}", _observed)
    _observers.append(observer)


def _observed(original: Callable) -> Callable:
    @functools.wraps(original)
    def update_weights(manager: Any, recv_req: Any) -> Any:
        for each in _observers:
            each.before_weight_update()
        try:
            return original(manager, recv_req)
        finally:  # a failed update may have changed some weights
            for each in _observers:
                each.after_weight_update()

    return update_weights
