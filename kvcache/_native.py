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
_CPU, _CUDA = "libkvcache_cpu", "libkvcache_cuda"
_found: dict[str, str] = {}
_missing: dict[str, str] = {}
_stubs: list[object] = []  # registrations, which end with these objects


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
    """Registers `torch.ops.kvcache`, once; the CUDA library only with a CUDA build of torch.

    A CUDA library that is missing takes nothing from the CPU: a call with CUDA tensors then raises a
    RuntimeError that says why it is missing.
    """
    import torch

    if _CPU not in _found:
        # A second definition of the namespace kills the process: another copy may have been here.
        others = hasattr(torch.ops.kvcache, "slot_mapping")
        _found[_CPU] = "registered by another copy of kvcache" if others else _load(_CPU)
    if torch.version.cuda and _CUDA not in _found and _CUDA not in _missing:
        if not _ops_without_cuda():
            _found[_CUDA] = "registered by another copy of kvcache"
            return
        try:
            _found[_CUDA] = _load(_CUDA)
        except (ImportError, OSError, RuntimeError) as error:  # not built; built for another CUDA
            what = "not built" if isinstance(error, ImportError) else "not loadable"
            _missing[_CUDA] = f"{what}: {error}"
            _refuse_cuda()


def _load(name: str) -> str:
    """Loads one library of ops; says where from."""
    import torch

    library = _PACKAGE / f"{name}.so"
    if library.exists() and not _forced_jit():
        torch.ops.load_library(str(library))
        return f"ahead of time, {library}"
    from kvcache import _jit

    return f"JIT, {_jit.build_ops(name)}"


def _ops_without_cuda() -> list[str]:
    import torch

    # Those that begin with "_" take no tensors: they belong to no device's key.
    names = [
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("kvcache::") and not name.startswith("kvcache::_")
    ]
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return [name for name in names if not has_kernel(name, "CUDA")]


def _refuse_cuda() -> None:
    """Gives every op that lacks a CUDA kernel one that says why."""
    import torch

    library = torch.library.Library("kvcache", "IMPL", "CUDA")
    _stubs.append(library)
    for name in _ops_without_cuda():

        def refuse(*args: object, name: str = name) -> None:
            raise RuntimeError(f"{name} got CUDA tensors, but {why_no_cuda()}")

        library.impl(name, refuse)


def why_no_cuda() -> str:
    """Why there are no CUDA ops."""
    import torch

    return (
        f"{_CUDA} is {_missing[_CUDA]}"
        if _CUDA in _missing
        else (f"torch {torch.__version__} is built without CUDA")
    )


def describe() -> dict[str, str]:
    """Where each native library of this process came from, or why it is missing."""
    return {**_found, **{name: reason.splitlines()[0] for name, reason in _missing.items()}}


core = _load_core()
