# SPDX-License-Identifier: Apache-2.0
"""Transports of KV between engines: over TCP and NIXL."""

from __future__ import annotations

from kvcache.lazy import lazy_names

_HOME = {"make_transport": "kvcache_exchange.transport.factory"}

__all__ = [*_HOME]  # noqa: PLE0604

__getattr__, __dir__ = lazy_names(__name__, _HOME)
