# SPDX-License-Identifier: Apache-2.0
"""Loads the native libraries, which are prebuilt or built at first use (`jit`).

`core` is the control plane's module and never needs torch. `load_ops()` registers `torch.ops.kvcache`.
With KVCACHE_JIT=1 in the environment, prebuilt libraries are ignored.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from kvcache.native import build

_PACKAGE = Path(__file__).resolve().parents[1]
_CPU, _CUDA = "libkvcache_cpu", "libkvcache_cuda"
_found: dict[str, str] = {}
_missing: dict[str, str] = {}
_stubs: list[object] = []  # deleting these objects removes the registrations


def _forced_jit() -> bool:
    return os.environ.get("KVCACHE_JIT") == "1"


def _load_core() -> ModuleType:
    # Search only this package's folder. The import hook of an editable install could find the module of
    # another checkout.
    spec = PathFinder.find_spec("kvcache._core", [str(_PACKAGE)])
    if spec is not None and not _forced_jit():
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules["kvcache._core"] = module
        _found["_core"] = f"ahead of time, {module.__file__}"
        return module
    from kvcache.native import jit

    module = jit.build_core()
    _found["_core"] = f"JIT, {module.__file__}"
    return module


def load_ops() -> None:
    """Register `torch.ops.kvcache` once per process. The CUDA library is loaded only if torch is built
    with CUDA.

    Without the CUDA library, the CPU ops still work, and a call with CUDA tensors raises a RuntimeError
    that explains why the library is missing. Raises RuntimeError if torch is too old, and ImportError if
    the CPU library is missing and cannot be built.
    """
    import torch

    if _CPU not in _found:
        build.check_torch_version(torch.__version__)
        # Another copy of the library may be loaded, and a second definition of the namespace would
        # abort the process.
        others = hasattr(torch.ops.kvcache, "slot_mapping")
        _found[_CPU] = "registered by another copy of kvcache" if others else _load(_CPU)
    if torch.version.cuda and _CUDA not in _found and _CUDA not in _missing:
        if not _ops_without_cuda():
            _found[_CUDA] = "registered by another copy of kvcache"
            return
        try:
            _found[_CUDA] = _load(_CUDA)
        except (ImportError, OSError, RuntimeError) as error:  # not built, or another CUDA version
            what = "not built" if isinstance(error, ImportError) else "not loadable"
            _missing[_CUDA] = f"{what}: {error}{_advice(str(error))}"
            _refuse_cuda(_ops_without_cuda())
            return
        problem = _driver_problem(
            torch.ops.kvcache._compiled_version(), torch.ops.kvcache._driver_version()
        )
        if problem:
            _missing[_CUDA] = problem
            _refuse_cuda(_ops_with_tensors())


def _load(name: str) -> str:
    """Load an op library, and return its origin."""
    import torch

    library = _PACKAGE / f"{name}.so"
    if library.exists() and not _forced_jit():
        torch.ops.load_library(str(library))
        return f"ahead of time, {library}"
    from kvcache.native import jit

    return f"JIT, {jit.build_ops(name)}"


def _advice(error: str) -> str:
    """Return a hint on how to fix a library that cannot be loaded."""
    import torch

    if "undefined symbol: cu" in error or "libcudart" in error:
        return (
            f" (compiled with a different CUDA version than torch {torch.__version__}: rebuild it with "
            f"a CUDA {torch.version.cuda} toolkit, in a checkout by `{build.INSTALL_HINT}`, or at "
            "first use with KVCACHE_JIT=1)"
        )
    return ""


def _driver_problem(compiled: int, driver: int) -> str | None:
    """Return a message if the driver is too old. Versions are CUDA's (13000 for 13.0)."""
    # Any driver for the same major version can run the compiled code. 0 means that there is no driver.
    if driver == 0 or driver // 1000 >= compiled // 1000:
        return None
    return (
        f"not usable: compiled with CUDA {_dotted(compiled)}, but the driver supports CUDA "
        f"{_dotted(driver)} at most: update the driver, or build with a CUDA {driver // 1000} "
        "toolkit (CUDA_HOME)"
    )


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _ops_with_tensors() -> list[str]:
    """Return the ops that are dispatched by device. The names of all other ops begin with "_"."""
    import torch

    names = torch._C._dispatch_get_all_op_names()
    return [n for n in names if n.startswith("kvcache::") and not n.startswith("kvcache::_")]


def _ops_without_cuda() -> list[str]:
    import torch

    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return [name for name in _ops_with_tensors() if not has_kernel(name, "CUDA")]


def _refuse_cuda(names: list[str]) -> None:
    """For each op, register a CUDA implementation that raises an error with the reason."""
    import torch

    library = torch.library.Library("kvcache", "IMPL", "CUDA")
    _stubs.append(library)
    for name in names:

        def refuse(*args: object, name: str = name) -> None:
            raise RuntimeError(f"{name} got CUDA tensors, but {why_no_cuda()}")

        library.impl(name, refuse, allow_override=True)


def why_no_cuda() -> str | None:
    """Return the reason why the CUDA ops are missing or unusable, or None if they can be used."""
    import torch

    if _CUDA in _missing:
        return f"{_CUDA} is {_missing[_CUDA]}"
    return None if _CUDA in _found else f"torch {torch.__version__} is built without CUDA"


def cuda_versions() -> str | None:
    """Return the CUDA versions of the driver and of the library, or None if no CUDA library is loaded."""
    import torch

    if not hasattr(torch.ops.kvcache, "_driver_version"):
        return None
    compiled, driver = torch.ops.kvcache._compiled_version(), torch.ops.kvcache._driver_version()
    known = f"supports CUDA {_dotted(driver)}" if driver else "is missing"
    return f"{known}; the CUDA ops are compiled with {_dotted(compiled)}"


def describe() -> dict[str, str]:
    """Return the origin of each native library in this process, or the reason why it is missing."""
    return {**_found, **{name: reason.splitlines()[0] for name, reason in _missing.items()}}


core = _load_core()
