# SPDX-License-Identifier: Apache-2.0
"""A vLLM platform that runs any vLLM wheel on any CPU, with PyTorch implementations in place of
compiled operators.

The worker, model runner, attention backend, sampler, scheduler and connectors are vLLM's own. The
platform requires `pip install --no-deps vllm==X`, PyTorch for CPUs, and those requirements of vLLM
that are written in Python. It is slow and only intended for tests of schedulers, managers and
connectors.
"""


def register() -> str:
    """Return the name of the platform's class. Called through vLLM's entry point group
    `vllm.platform_plugins`.
    """
    return "tests.machinery.vllm_platform.platform.PyTorchPlatform"
