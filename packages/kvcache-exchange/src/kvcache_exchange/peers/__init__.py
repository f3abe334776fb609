# SPDX-License-Identifier: Apache-2.0
"""An index of the prefixes that other engines have cached, and a source that loads these prefixes.

Names are imported on first use. Requires the packages on which `kvcache_exchange.router_events` depends.
"""

from __future__ import annotations

from kvcache.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
