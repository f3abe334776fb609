# SPDX-License-Identifier: Apache-2.0
"""Hints about the future use of KV: prefetch and pin.

Hints are best effort. `HintExecutor` carries them out within fixed limits, and answers each hint with a
`Receipt` that states how many tokens it affected. docs/hints.md describes the intents.
"""

from __future__ import annotations

from kvcache.lazy import lazy_names

_HOME = {
    "Hint": "kvcache_exchange.hints.vocabulary",
    "HintExecutor": "kvcache_exchange.hints.executor",
    "HintStats": "kvcache_exchange.hints.stats",
    "INTENTS": "kvcache_exchange.hints.vocabulary",
    "PendingHint": "kvcache_exchange.hints.receipts",
    "Receipt": "kvcache_exchange.hints.vocabulary",
}

__all__ = [*_HOME]  # noqa: PLE0604

__getattr__, __dir__ = lazy_names(__name__, _HOME, ())
