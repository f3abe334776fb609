# SPDX-License-Identifier: Apache-2.0
"""KV between engines and outside them: transports, stores, disaggregation, peers, hints and events."""

from __future__ import annotations

from kvcache.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
