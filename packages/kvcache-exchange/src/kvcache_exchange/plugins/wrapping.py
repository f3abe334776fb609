# SPDX-License-Identifier: Apache-2.0
"""Wraps functions of an engine, for plug-ins that observe it or change it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

_log = logging.getLogger("kvcache.sanitizer")
_MARK = "_kvcache_wraps"


def wrap_once(owner: Any, name: str, wrap: Callable[[Callable], Callable]) -> None:
    """Replace a function with `wrap(function)`, unless it is already wrapped.

    Args:
        owner: A module, class or object.
        name: An attribute of `owner`.
        wrap: Returns the replacement.
    """
    original = getattr(owner, name)
    # `functools.wraps` copies the mark, even if the engine decorates the function again.
    marks, mark = getattr(original, _MARK, ()), (wrap.__module__, wrap.__qualname__)
    if mark not in marks:
        replacement = wrap(original)
        setattr(replacement, _MARK, (*marks, mark))
        setattr(owner, name, replacement)


def is_wrapped(function: Callable, wrap: Callable) -> bool:
    """Return whether `wrap_once` has wrapped a function with `wrap`."""
    return (wrap.__module__, wrap.__qualname__) in getattr(function, _MARK, ())


def start_observer(observe: Callable[[], object]) -> None:
    """Call `observe`. If it fails, log the reason, so that the engine runs without the sanitizer.

    Raises:
        Exception: `observe` failed, and KVCACHE_SANITIZE is "stop".
    """
    try:
        observe()
    except Exception as failure:
        if os.environ["KVCACHE_SANITIZE"] == "stop":
            raise
        _log.error("The KV cache sanitizer is off: %s", failure)
