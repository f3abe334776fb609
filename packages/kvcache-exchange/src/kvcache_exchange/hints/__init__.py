# SPDX-License-Identifier: Apache-2.0
"""Hints about the future use of KV: prefetch and pin.

Hints are best effort. `HintExecutor` carries them out within fixed limits, and answers each hint with a
`Receipt` that states how many tokens it affected. docs/hints.md describes the intents.
"""

from __future__ import annotations

from kvcache.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
