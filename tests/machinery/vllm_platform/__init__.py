# SPDX-License-Identifier: Apache-2.0
"""A vLLM platform that runs any vLLM wheel on any CPU, with PyTorch in place of compiled operators.

The worker, model runner, attention backend, sampler, scheduler and connectors are vLLM's own. Needs
`pip install --no-deps vllm==X`, PyTorch for CPUs, and vLLM's requirements written in Python. Slow per
token, and meant for tests of schedulers, managers and connectors only.
"""


def register() -> str:
    """Return the platform's class, for vLLM's entry point group `vllm.platform_plugins`."""
    return "tests.machinery.vllm_platform.platform.PyTorchPlatform"
