# SPDX-License-Identifier: Apache-2.0
"""Reads the sanitizer's options from environment variables, so that an engine need not be changed."""

from __future__ import annotations

import os

from kvcache.checks import shown
from kvcache.sanitizer.arguments import MODES


def options_from_environment() -> dict[str, object] | None:
    """Return the options for `Sanitizer`, or None if the sanitizer is disabled.

    - `KVCACHE_SANITIZE`: "1" or "report"; "stop"; or "0" to disable the sanitizer.
    - `KVCACHE_SANITIZE_EVERY`: N, to check reads only in every Nth step.

    Raises:
        ValueError: A variable has an unknown value.
    """
    mode = os.environ.get("KVCACHE_SANITIZE", "")
    if mode in ("", "0"):
        return None
    if mode not in ("1", *MODES):
        known = ", ".join(map(repr, ("1", *MODES)))
        raise ValueError(f"KVCACHE_SANITIZE is {shown(mode)}: expected one of {known}")
    options: dict[str, object] = {"mode": "report" if mode == "1" else mode}
    every = os.environ.get("KVCACHE_SANITIZE_EVERY", "")
    if every:
        if not every.isdecimal() or int(every) < 1:
            raise ValueError(
                f"KVCACHE_SANITIZE_EVERY is {shown(every)}: expected a positive integer"
            )
        options["every"] = int(every)
    return options
