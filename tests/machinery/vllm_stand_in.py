# SPDX-License-Identifier: Apache-2.0
"""Stand-ins, for machines without vLLM, for the few vLLM names that the worker side of the
integration uses.

    with stand_in():
        from kvcache_vllm.offloading.host_worker import HostWorker

Modules are imported individually, because each package's `__init__` would import the complete
integration.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

import numpy as np

from tests.machinery import roots

_OWN = "kvcache_vllm"
_SOURCE = next(root for root in roots.SOURCES if root.name == _OWN)


class GPULoadStoreSpec:
    def __init__(self, block_ids, group_sizes, block_indices):
        self.block_ids = np.array(block_ids, np.int64)
        self.group_sizes, self.block_indices = group_sizes, block_indices


@dataclass
class CanonicalKVCacheTensor:
    tensor: object
    page_size_bytes: int


@dataclass
class CanonicalKVCacheRef:
    tensor_idx: int
    page_size_bytes: int


@dataclass
class CanonicalKVCaches:
    tensors: list
    group_data_refs: list = field(default_factory=list)


@dataclass
class TransferResult:
    job_id: int
    success: bool
    transfer_size: int | None = None
    transfer_time: float | None = None


class _Named(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Module(ModuleType):
    """A module with the given attributes. Every other attribute is an empty class. It can be used
    as a base class and in annotations, and the value of each of its attributes is the attribute's name.
    """

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Named(name, (), {})
        setattr(self, name, made)
        return made


_NAMES = {
    "vllm.distributed.parallel_state": {"get_tensor_model_parallel_rank": lambda: 0},
    "vllm.logger": {"init_logger": logging.getLogger},
    "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: False)},
    "vllm.v1.kv_offload.base": {
        each.__name__: each
        for each in (
            GPULoadStoreSpec, CanonicalKVCacheTensor, CanonicalKVCacheRef, CanonicalKVCaches,
            TransferResult,
        )
    },
}  # fmt: skip


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] != "vllm":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        vars(module).update(_NAMES.get(module.__name__, {}))


@contextlib.contextmanager
def stand_in() -> Iterator[None]:
    """During the block, replace vLLM's modules with stand-ins, and import the integration's modules
    again.
    """
    kept = {
        name: sys.modules.pop(name)
        for name in list(sys.modules)
        if name.split(".")[0] == "vllm" or name.startswith(_OWN)
    }
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    for part in ("", ".disaggregation", ".offloading"):
        package = sys.modules[_OWN + part] = ModuleType(_OWN + part)
        package.__path__ = [str(_SOURCE.joinpath(*part.split(".")[1:]))]
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in list(sys.modules):
            if name.split(".")[0] == "vllm" or name.startswith(_OWN):
                del sys.modules[name]
        sys.modules.update(kept)
