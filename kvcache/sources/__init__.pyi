# SPDX-License-Identifier: Apache-2.0
"""Public names, which `__init__.py` imports on first use."""

from kvcache.sources.base import Arrived as Arrived
from kvcache.sources.base import KVSource as KVSource
from kvcache.sources.base import LoadStats as LoadStats
