# SPDX-License-Identifier: Apache-2.0
"""Hints about the future use of KV: prefetch and pin.

Hints are best effort. `HintExecutor` carries them out within fixed limits, and answers each hint with a
`Receipt` that states how many tokens it affected. docs/hints.md describes the intents.
"""

from __future__ import annotations

from kvcache.lazy import lazy_names

_HOME = {
    "Hint": "kvcache.hints.vocabulary",
    "HintExecutor": "kvcache.hints.executor",
    "HintStats": "kvcache.hints.stats",
    "INTENTS": "kvcache.hints.vocabulary",
    "PendingHint": "kvcache.hints.receipts",
    "Receipt": "kvcache.hints.vocabulary",
}

__all__ = [*_HOME]  # noqa: PLE0604

__getattr__, __dir__ = lazy_names(__name__, _HOME, ())
