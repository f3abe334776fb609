# SPDX-License-Identifier: Apache-2.0
"""Public names, for type checkers. `__init__.py` imports each name on first use."""

from kvcache.sources.disaggregation.cache_rank import CacheRank as CacheRank
from kvcache.sources.disaggregation.cache_rank import layouts_of_plan as layouts_of_plan
from kvcache.sources.disaggregation.connector import Connector as Connector
from kvcache.sources.disaggregation.layout import GroupLayout as GroupLayout
from kvcache.sources.disaggregation.offer import Offer as Offer
from kvcache.sources.disaggregation.options import ConnectorOptions as ConnectorOptions
from kvcache.sources.disaggregation.prefill import PrefillStats as PrefillStats
from kvcache.sources.disaggregation.prefill import RemotePrefill as RemotePrefill
