"""Public names, for type checkers; `__init__.py` imports each when it is first used."""

from kvcache.disaggregation.cache_rank import CacheRank as CacheRank
from kvcache.disaggregation.cache_rank import layouts_of_plan as layouts_of_plan
from kvcache.disaggregation.connector import Connector as Connector
from kvcache.disaggregation.connector import Loaded as Loaded
from kvcache.disaggregation.layout import GroupLayout as GroupLayout
from kvcache.disaggregation.offer import Offer as Offer
from kvcache.disaggregation.options import ConnectorOptions as ConnectorOptions
