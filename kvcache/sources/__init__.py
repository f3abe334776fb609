"""KV that comes from outside the engine: other engines, and stores on disk or over the network.

Each source implements `KVSource`; an engine takes any number of them.
"""

from __future__ import annotations

from kvcache.lazy import lazy_names

_HOME = {
    "Arrived": "kvcache.sources.base",
    "KVSource": "kvcache.sources.base",
    "LoadStats": "kvcache.sources.base",
}

__all__ = [*_HOME]  # noqa: PLE0604

__getattr__, __dir__ = lazy_names(__name__, _HOME, ("disaggregation", "store"))
