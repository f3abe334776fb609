# SPDX-License-Identifier: Apache-2.0
from kvcache_exchange.hints.executor import HintExecutor as HintExecutor
from kvcache_exchange.hints.receipts import PendingHint as PendingHint
from kvcache_exchange.hints.stats import HintStats as HintStats
from kvcache_exchange.hints.vocabulary import INTENTS as INTENTS
from kvcache_exchange.hints.vocabulary import Hint as Hint
from kvcache_exchange.hints.vocabulary import Receipt as Receipt
