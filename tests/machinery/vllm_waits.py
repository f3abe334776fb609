"""Lets vLLM's processes sleep while they wait for each other, in every process that imports this.

They call `sched_yield` in a loop. Two workers of a tensor-parallel engine have then kept both cores of a
machine for up to 20 s (Linux 6.18): no other process of it ran, and deadlines of transfers passed.
"""

from vllm.distributed import utils

utils.USE_SCHED_YIELD = False


class Extension:
    """Of vLLM's worker: named as `worker_extension_cls`, it has a worker import this."""
