# SPDX-License-Identifier: Apache-2.0
"""A small reference engine with a scheduler, batching and sampling. It is meant to be read, tested and
extended.
"""

from kvcache_serve.engine.batch import Batch, Context
from kvcache_serve.engine.drafters import NgramDrafter
from kvcache_serve.engine.engine import Engine
from kvcache_serve.engine.generation import Delta, Generation, Sample
from kvcache_serve.engine.metrics import Metrics
from kvcache_serve.engine.pool_states import PoolStates, pool_states
from kvcache_serve.engine.sampling import SamplingParams, TokenLogprob
from kvcache_serve.engine.sanitizing import sanitizer_of
from kvcache_serve.engine.scheduler import ScheduledStep, Scheduler
from kvcache_serve.engine.sequence import Sequence, State

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
