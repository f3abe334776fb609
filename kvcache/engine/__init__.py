# SPDX-License-Identifier: Apache-2.0
"""A small reference engine with a scheduler, batching and sampling. It is meant to be read, tested and
extended.
"""

from kvcache.engine.batch import Batch, Context
from kvcache.engine.drafters import NgramDrafter
from kvcache.engine.engine import Engine
from kvcache.engine.generation import Delta, Generation, Sample
from kvcache.engine.metrics import Metrics
from kvcache.engine.pool_states import PoolStates, pool_states
from kvcache.engine.sampling import SamplingParams, TokenLogprob
from kvcache.engine.sanitizing import sanitizer_of
from kvcache.engine.scheduler import ScheduledStep, Scheduler
from kvcache.engine.sequence import Sequence, State

__all__ = [
    "Batch",
    "Context",
    "Delta",
    "Engine",
    "Generation",
    "Metrics",
    "NgramDrafter",
    "PoolStates",
    "Sample",
    "SamplingParams",
    "ScheduledStep",
    "Scheduler",
    "Sequence",
    "State",
    "TokenLogprob",
    "pool_states",
    "sanitizer_of",
]
