# SPDX-License-Identifier: Apache-2.0
"""Public names, which `__init__.py` imports on first use."""

from kvcache_exchange.hints.executor import HintExecutor as HintExecutor
from kvcache_exchange.hints.receipts import PendingHint as PendingHint
from kvcache_exchange.hints.stats import HintStats as HintStats
from kvcache_exchange.hints.vocabulary import INTENTS as INTENTS
from kvcache_exchange.hints.vocabulary import Hint as Hint
from kvcache_exchange.hints.vocabulary import Receipt as Receipt
