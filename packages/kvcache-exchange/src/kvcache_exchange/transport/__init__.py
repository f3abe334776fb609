# SPDX-License-Identifier: Apache-2.0
"""Transports of KV between engines: over TCP and NIXL."""

from __future__ import annotations

from kvcache.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
