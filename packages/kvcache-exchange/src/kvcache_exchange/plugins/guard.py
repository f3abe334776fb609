# SPDX-License-Identifier: Apache-2.0
"""Keeps an engine running if its observer fails."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from typing import Any

from kvcache.sanitizer import Sanitizer, SanitizerError

_log = logging.getLogger("kvcache.sanitizer")


class ObserverGuard:
    """Calls an observer's functions until one of them fails.

    In mode "report", a failure is logged, and later calls do nothing. In mode "stop", each failure
    is raised. Findings (`SanitizerError`) are raised in both modes. If the sanitizer rejects what
    the engine does, for example a negative position, that is a finding and no failure.

    Attributes:
        failure: A one-line description of the failure, or None.
    """

    def __init__(self, sanitizer: Sanitizer) -> None:
        self._sanitizer = sanitizer
        self.failure: str | None = None

    def findings(self) -> dict[str, object]:
        """Return the findings so far as plain data: the reports as text, counts, totals, and
        `failure`.
        """
        sanitizer = self._sanitizer
        return {
            "reports": [str(report) for report in sanitizer.reports],
            "counts": {str(kind): count for kind, count in sanitizer.counts.items()},
            "steps": sanitizer.step,
            "slots_read": sanitizer.slots_read,
            "slots_compared": sanitizer.slots_compared,
            "slots_written": sanitizer.slots_written,
            "off": self.failure,
        }

    def __call__(self, call: Callable[..., object], *arguments: Any) -> None:
        """Call a function of the observer."""
        if self.failure is not None and self._sanitizer.mode != "stop":
            return
        try:
            call(*arguments)
        except SanitizerError:
            raise
        except Exception as failure:
            if rejected := _rejected_call(failure):
                self._sanitizer.reject(rejected, f"{type(failure).__name__}: {failure}")
                return
            self.failure = f"{type(failure).__name__}: {failure}"
            if self._sanitizer.mode == "stop":
                raise
            _log.exception(
                "The KV cache sanitizer cannot observe this engine and is off from now on"
            )


def _rejected_call(failure: Exception) -> str | None:
    """Return the name of the call that rejected the engine's input: a method of the sanitizer, or a
    lookup of a request, row or column that does not exist. None: the observer has failed.
    """
    frames = [frame for frame, _ in traceback.walk_tb(failure.__traceback__)]
    if isinstance(failure, TypeError | ValueError):
        frames = [each for each in frames if isinstance(each.f_locals.get("self"), Sanitizer)][:1]
    elif not isinstance(failure, LookupError):
        frames = []
    return frames[-1].f_code.co_name if frames else None
