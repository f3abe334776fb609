# SPDX-License-Identifier: Apache-2.0
"""Sources of KV outside the engine, such as other engines and stores on disk or over the network.

Each source implements `KVSource`. An engine can use any number of sources.
"""

from __future__ import annotations

from kvcache.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
