# SPDX-License-Identifier: Apache-2.0
from kvcache.hints.executor import HintExecutor as HintExecutor
from kvcache.hints.receipts import PendingHint as PendingHint
from kvcache.hints.stats import HintStats as HintStats
from kvcache.hints.vocabulary import INTENTS as INTENTS
from kvcache.hints.vocabulary import Hint as Hint
from kvcache.hints.vocabulary import Receipt as Receipt
