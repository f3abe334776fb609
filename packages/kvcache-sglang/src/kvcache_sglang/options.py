# SPDX-License-Identifier: Apache-2.0
"""Reads the options of the exchange from an environment variable."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcache_exchange.disaggregation.options import ConnectorOptions

VARIABLE = "KVCACHE_EXCHANGE"
BACKEND = "kvcache"  # the value of SGLang's --radix-cache-backend


def resolved(arguments: Any, name: str) -> Any:
    """Return the value of an option as SGLang has resolved it, which its `server_args` do not contain."""
    from sglang.srt import runtime_context

    for group in ("memory", "schedule", "disagg", "serving", "spec", "parallel"):
        try:
            return getattr(getattr(runtime_context, f"get_{group}")(), name)
        except (
            AttributeError,
            ValueError,
        ):  # an option of another group, or no group is published yet
            continue
    return getattr(arguments, name)


def options_from_environment() -> ConnectorOptions:
    """Return the options in KVCACHE_EXCHANGE.

    Raises TypeError or ValueError if they are invalid.
    """
    from kvcache_exchange.disaggregation.options import ConnectorOptions

    try:
        values = json.loads(os.environ[VARIABLE])
    except ValueError:
        raise ValueError(
            f"{VARIABLE} is {os.environ[VARIABLE]!r}: expected a JSON object, such as {{}}"
        ) from None
    return ConnectorOptions.from_config(values, VARIABLE)
