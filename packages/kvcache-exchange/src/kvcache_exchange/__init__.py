# SPDX-License-Identifier: Apache-2.0
"""KV between engines and outside them: transports, stores, disaggregation, peers, hints and events."""

from __future__ import annotations

from kvcache.lazy import lazy_names

_HOME = {"KVIdentity": "kvcache_exchange.identity"}

__all__ = [*_HOME]  # noqa: PLE0604

__getattr__, __dir__ = lazy_names(__name__, _HOME)
