"""Finds the native libraries: built ahead of time, or built now (`_jit`) where they are not.

`core` is the control plane's module and never needs torch; `load_ops()` registers
`torch.ops.kvcache`. KVCACHE_JIT=1 passes over what was built ahead of time.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

_PACKAGE = Path(__file__).resolve().parent
_found: dict[str, str] = {}


def _forced_jit() -> bool:
    return os.environ.get("KVCACHE_JIT") == "1"


def _load_core() -> ModuleType:
    # Beside this file and nowhere else: an editable install would also find another checkout's.
    spec = PathFinder.find_spec("kvcache._core", [str(_PACKAGE)])
    if spec is not None and not _forced_jit():
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules["kvcache._core"] = module
        _found["_core"] = f"ahead of time, {module.__file__}"
        return module
    from kvcache import _jit

    module = _jit.build_core()
    _found["_core"] = f"JIT, {module.__file__}"
    return module


def load_ops() -> None:
    """Registers `torch.ops.kvcache`, once; the CUDA library only with a CUDA build of torch."""
    import torch

    # A second definition of the namespace kills the process: another copy may have been here.
    if hasattr(torch.ops.kvcache, "slot_mapping"):
        _found.setdefault("libkvcache_cpu", "registered by another copy of kvcache")
        return
    names = ["libkvcache_cpu"]
    if torch.version.cuda:
        names.append("libkvcache_cuda")
    for name in names:
        library = _PACKAGE / f"{name}.so"
        if library.exists() and not _forced_jit():
            torch.ops.load_library(str(library))
            _found[name] = f"ahead of time, {library}"
        else:
            from kvcache import _jit

            _found[name] = f"JIT, {_jit.build_ops(name)}"


def describe() -> dict[str, str]:
    """Where each native library of this process came from."""
    return dict(_found)


core = _load_core()
