# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU platform without `vllm._C`."""

from vllm.platforms.cpu import CpuPlatform


class PyTorchPlatform(CpuPlatform):
    """vLLM's CPU platform with the operators of `tests.machinery.vllm_platform.operators`."""

    @classmethod
    def import_kernels(cls) -> None:
        """Define the PyTorch operators instead of loading vLLM's extension."""
        from tests.machinery.vllm_platform import operators

        operators.define()

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """Replace vLLM's fallback for the slot mapping kernel.

        In vLLM 0.32.0, the parameters of the fallback differ from those of the kernel.
        """
        from vllm.utils import cpu_triton_utils

        from tests.machinery.vllm_platform import operators

        cpu_triton_utils._compute_slot_mapping_kernel_impl = operators.slot_mapping_of_any_version
        super().register_triton_kernel_overrides()
