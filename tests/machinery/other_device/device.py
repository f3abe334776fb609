# SPDX-License-Identifier: Apache-2.0
"""Builds and registers the device "sealed" (device.cpp) once per process."""

from __future__ import annotations

import fcntl
import functools
from pathlib import Path
from types import ModuleType

import torch

from tests.machinery.shared import REPO

NAME = "sealed"
_SOURCE = Path(__file__).with_name("device.cpp")


@functools.cache
def native() -> ModuleType:
    """Load the extension, which registers `torch.device("sealed")`.

    The first build takes a minute.
    """
    from torch.utils import cpp_extension

    folder = REPO / "build" / "other_device"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "held").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        # torch's lock file, which a killed build leaves behind
        (folder / "lock").unlink(missing_ok=True)
        extension = cpp_extension.load(
            "kvcache_sealed_device",
            [str(_SOURCE)],
            extra_cflags=["-O1"],
            build_directory=str(folder),
        )
    torch.utils.rename_privateuse1_backend(NAME)
    module = ModuleType(f"torch.{NAME}")
    module.is_available = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    module.get_amp_supported_dtype = lambda: []
    torch._register_device_module(NAME, module)
    return extension
