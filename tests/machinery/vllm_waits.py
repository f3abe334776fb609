# SPDX-License-Identifier: Apache-2.0
"""Makes vLLM's processes sleep while they wait for each other.

Applies to every process that imports this module.

By default, they call `sched_yield` in a loop. Two workers of a tensor-parallel engine thereby
occupied both cores of a machine for up to 20 s (Linux 6.18). No other process ran, so transfers
missed their deadlines.
"""

from vllm.distributed import utils

utils.USE_SCHED_YIELD = False


class Extension:
    """A vLLM worker extension.

    Its name in `worker_extension_cls` makes a worker import this module.
    """
