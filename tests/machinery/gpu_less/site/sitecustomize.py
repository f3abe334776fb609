# SPDX-License-Identifier: Apache-2.0
"""Replaces NVIDIA's libraries with the simulated runtime when a Python process starts.

The dynamic linker finds a loaded library by its soname, so torch uses these libraries. After torch
has been imported, tests.machinery.gpu_less.plugin takes over torch's own operators.
"""

import ctypes
import importlib.abc
import importlib.machinery
import os
import sys


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Finds torch with the standard path finder, and starts the plug-in after torch is imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        # The finder stays installed, because code that only calls find_spec does not import torch.
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_start(module):
            ctypes.CDLL(os.environ["KVCACHE_GPULESS_DRIVER"], mode=ctypes.RTLD_GLOBAL)
            ctypes.CDLL(os.environ["KVCACHE_GPULESS_RUNTIME"], mode=ctypes.RTLD_GLOBAL)
            execute(module)
            from tests.machinery.gpu_less import plugin

            plugin.start()

        spec.loader.exec_module = execute_and_start
        return spec


if "KVCACHE_GPULESS_RUNTIME" in os.environ:
    sys.meta_path.insert(0, _AfterTorch())
