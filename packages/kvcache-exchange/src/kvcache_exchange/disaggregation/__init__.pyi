# SPDX-License-Identifier: Apache-2.0
"""Public names, which `__init__.py` imports on first use."""

from kvcache_exchange.disaggregation.cache_rank import CacheRank as CacheRank
from kvcache_exchange.disaggregation.cache_rank import layouts_of_plan as layouts_of_plan
from kvcache_exchange.disaggregation.connector import Connector as Connector
from kvcache_exchange.disaggregation.layout import GroupLayout as GroupLayout
from kvcache_exchange.disaggregation.offer import Offer as Offer
from kvcache_exchange.disaggregation.options import ConnectorOptions as ConnectorOptions
from kvcache_exchange.disaggregation.prefill import PrefillStats as PrefillStats
from kvcache_exchange.disaggregation.prefill import RemotePrefill as RemotePrefill
