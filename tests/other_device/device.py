"""Builds and registers the device "sealed" (device.cpp), once per process."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from types import ModuleType

import torch

NAME = "sealed"
_SOURCE = Path(__file__).with_name("device.cpp")


@functools.cache
def native() -> ModuleType:
    """The extension; `torch.device("sealed")` is known from then on. Takes a minute where it is not built yet.

    The build is torch's, in its folder of extensions (TORCH_EXTENSIONS_DIR), compiled once per version of the source.
    """
    from torch.utils import cpp_extension

    extension = cpp_extension.load("kvcache_sealed_device", [str(_SOURCE)], extra_cflags=["-O1"])
    torch.utils.rename_privateuse1_backend(NAME)
    module = ModuleType(f"torch.{NAME}")
    module.is_available = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    module.get_amp_supported_dtype = lambda: []
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return extension
