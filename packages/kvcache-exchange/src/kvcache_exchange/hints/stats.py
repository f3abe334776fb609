# SPDX-License-Identifier: Apache-2.0
"""Counts of hints."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcache_exchange.hints.vocabulary import INTENTS, STATUSES


@dataclass(slots=True)
class HintStats:
    """Counts of a `HintExecutor` since it was created."""

    receipts: dict[str, dict[str, int]] = field(
        default_factory=lambda: {intent: dict.fromkeys(STATUSES, 0) for intent in INTENTS}
    )
    """Number of receipts, by intent and status."""

    prefetched_tokens: int = 0
    """Number of tokens that prefetches loaded to the device."""

    used_tokens: int = 0
    """Number of prefetched tokens that were still on the device when a request hit them."""

    unused_tokens: int = 0
    """Number of prefetched tokens that were evicted or not hit within 60 seconds."""
