"""Loaded by each Python that runs without a GPU: puts our libraries in the place of NVIDIA's.

A library that is loaded already is found by its soname, so torch takes these. When torch has been
imported, tests.machinery.gpu_less.plugin takes over its own operators.
"""

import ctypes
import importlib.abc
import importlib.machinery
import os
import sys


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Finds torch as others do, and starts the plug-in once it has been imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        # Stays in place: who only looks whether torch is there (find_spec) does not import it.
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
