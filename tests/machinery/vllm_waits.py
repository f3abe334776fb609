# SPDX-License-Identifier: Apache-2.0
"""Makes vLLM's processes sleep while they wait for each other.

This applies to every process that imports this module.

By default, waiting processes call `sched_yield` in a loop. As a result, the two workers of a
tensor-parallel engine occupied both cores of a machine for up to 20 s (Linux 6.18). No other
process could run meanwhile, so transfers missed their deadlines.
"""

from vllm.distributed import utils

utils.USE_SCHED_YIELD = False


class Extension:
    """A vLLM worker extension.

    If `worker_extension_cls` contains the name of this class, each worker imports this module.
    """
