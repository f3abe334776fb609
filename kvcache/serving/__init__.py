"""A small engine over the library: scheduler, batches, sampling. To read, to test with, to build on."""

from kvcache.serving.batch import Batch, Context
from kvcache.serving.drafters import NgramDrafter
from kvcache.serving.engine import Engine
from kvcache.serving.generation import Delta, Generation, Sample
from kvcache.serving.metrics import Metrics
from kvcache.serving.pool_states import PoolStates, pool_states
from kvcache.serving.sampling import SamplingParams
from kvcache.serving.scheduler import ScheduledStep, Scheduler
from kvcache.serving.sequence import Sequence, State

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
    "pool_states",
]
