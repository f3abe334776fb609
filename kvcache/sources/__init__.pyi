# SPDX-License-Identifier: Apache-2.0
"""Public names, for type checkers. `__init__.py` imports each name on first use."""

from kvcache.sources.base import Arrived as Arrived
from kvcache.sources.base import KVSource as KVSource
from kvcache.sources.base import LoadStats as LoadStats
