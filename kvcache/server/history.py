# SPDX-License-Identifier: Apache-2.0
"""Keeps samples of the cache's state over the last minutes, so that reloading the page loses no data."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

_INTERVAL_S = 0.5
_MOST_POINTS = 1_200  # covers ten minutes of continuous work


class History:
    """Records the state every half second.

    The engine's thread adds points, and other threads read them.
    """

    def __init__(self) -> None:
        self._points: deque[dict[str, Any]] = deque(maxlen=_MOST_POINTS)

    def add(self, state: dict[str, Any]) -> None:
        """Add a point, unless the last point is recent. If no sequences are running anymore,
        replace a recent point.

        No points are added while the engine is idle. Before the first point after an idle period, a
        copy of the last point is added, so that rates between points do not average over the idle
        time.
        """
        now = round(time.time(), 3)
        last = self._points[-1] if self._points else None
        if last is not None:
            if 0 <= now - last["time"] < _INTERVAL_S:
                if state["num_sequences"]:
                    return
                self._points.pop()
            if now - last["time"] > 3 * _INTERVAL_S:
                self._points.append(last | {"time": now - _INTERVAL_S})
        metrics = state["metrics"]
        self._points.append(
            {
                "time": now,
                "pool": state["pool"],
                "hit_rate": state["hit_rate"],
                "prompt_tokens": metrics["prompt_tokens"],
                "generated_tokens": metrics["generated_tokens"],
                "computed_tokens": metrics["computed_tokens"],
                "num_sequences": state["num_sequences"],
            }
        )

    def since(self, moment: float) -> list[dict[str, Any]]:
        """Return all points after the time `moment` (in seconds since the epoch)."""
        return [each for each in self._points.copy() if each["time"] > moment]
