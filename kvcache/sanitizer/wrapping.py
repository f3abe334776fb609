# SPDX-License-Identifier: Apache-2.0
"""Wraps functions of an engine, each once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_MARK = "_kvcache_sanitizer_wraps"


def wrap_once(owner: Any, name: str, wrap: Callable[[Callable], Callable]) -> None:
    """Replace a function by `wrap(function)`, unless this was done before.

    Args:
        owner: A module, class or object.
        name: An attribute of `owner`.
        wrap: Returns the replacement.
    """
    original = getattr(owner, name)
    if not hasattr(original, _MARK):  # a decorator of the engine may have set `__wrapped__`
        replacement = wrap(original)
        setattr(replacement, _MARK, original)
        setattr(owner, name, replacement)
