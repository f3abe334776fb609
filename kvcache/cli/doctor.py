# SPDX-License-Identifier: Apache-2.0
"""`kvcache doctor`: reports versions, native libraries with their origin, and build tools."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from kvcache.cli.errors import UsageError
from kvcache.cli.parts import part

if TYPE_CHECKING:
    from rich.table import Table

# Distribution -> (extra that installs the distribution, feature that requires the distribution).
_EXTRAS = {
    "matplotlib": ("cli", "--plot"),
    "transformers": ("transformers", "kvcache demo and kvcache serve"),
    "fastapi": ("serve", "kvcache serve"),
    "uvicorn": ("serve", "kvcache serve"),
    "prometheus-client": ("metrics", "kvcache serve"),
    "msgspec": ("events", "--events"),
    "pyzmq": ("events", "--events"),
    "gguf": ("smollm2", "--model smollm2"),
    "nixl": ("nixl", "--store, --prefill-from and transfers over NIXL"),
    "mooncake-transfer-engine-non-cuda": ("mooncake", "the store and transport of Mooncake"),
    "vllm": ("vllm", "kvcache in vLLM"),
}


def table(rows: list[tuple[str, str, bool]]) -> Table:
    """Return the rows of `diagnosis` as a `rich` table."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(title="kvcache doctor")
    shown.add_column("what", style="cyan", no_wrap=True)
    shown.add_column("found", overflow="fold")
    for name, found, ok in rows:
        shown.add_row(name, Text(found, style="" if ok else "red"))
    return shown


def diagnosis() -> list[tuple[str, str, bool]]:
    """Return one row per component: (component, finding, whether the component is usable)."""
    from importlib.metadata import version

    import kvcache

    rows = [
        ("kvcache", kvcache.__version__, True),
        ("python", f"{sys.version.split()[0]}, {sys.executable}", True),
        _asked("numpy", _numpy, needed=True),
        _asked("torch", _torch, needed=True),
        _asked("rich", partial(version, "rich"), needed=True),
        _asked("_core", lambda: _library("_core"), needed=True),
        _asked("SHA-256", _sha256),
        _asked("CPU ops", lambda: _library("libkvcache_cpu"), needed=True),
        _cuda_row(),
        _asked("CUDA driver", _cuda_driver),
        _asked("locked memory", _locked_memory),
    ]
    tools = (("C++ compiler", _compiler), ("nvcc", _nvcc))
    extras = ((name, partial(_version, name, *of)) for name, of in _EXTRAS.items())
    return [*rows, *(_asked(name, ask) for name, ask in (*tools, *extras))]


def of_vllm(arguments: list[str]) -> list[tuple[str, str, bool]]:
    """Return rows in the format of `diagnosis` for a model in vLLM with kvcache's scheduler."""
    if not arguments:
        raise UsageError("--vllm: expected a model, or a folder with its config.json")
    return part("diagnose_vllm", "--vllm")(arguments)


def _asked(name: str, ask: Callable[[], str], needed: bool = False) -> tuple[str, str, bool]:
    try:
        return name, ask(), True
    except Exception as error:  # report any failure as a row
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return name, f"missing: {lines[0]}", not needed


def _cuda_row() -> tuple[str, str, bool]:
    """Report missing CUDA ops as an error only if there is a CUDA device."""
    name, found, ok = _asked("CUDA ops", _cuda_ops)
    if found.startswith("not ") and not found.startswith("not needed"):
        import torch

        ok = not torch.cuda.is_available()
    return name, found, ok


def _numpy() -> str:
    import numpy

    return numpy.__version__


def _torch() -> str:
    import torch

    if not torch.version.cuda:
        return f"{torch.__version__}, without CUDA"
    devices = f"{torch.cuda.device_count()} devices" if torch.cuda.is_available() else "no device"
    return f"{torch.__version__}, CUDA {torch.version.cuda}, {devices}"


def _library(name: str) -> str:
    from kvcache.native import load

    if name != "_core":
        load.load_ops()
    return load.describe()[name]


def _cuda_ops() -> str:
    import torch

    if not torch.version.cuda:
        return "not needed: torch is built without CUDA"
    return _library("libkvcache_cuda")


def _cuda_driver() -> str:
    import torch

    from kvcache.native import load

    if not torch.version.cuda:
        return "not needed: torch is built without CUDA"
    _library("libkvcache_cpu")
    return load.cuda_versions() or "unknown: it cannot be queried without a CUDA library"


def _locked_memory() -> str:
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return "not limited"
    return (
        f"{limit / 2**20:,.1f} MiB at most (`ulimit -l`): pinning more host pages may fail; raise the "
        "limit with `ulimit -l unlimited` or `docker run --ulimit memlock=-1`"
    )


def _sha256() -> str:
    from kvcache.native.load import core

    name = core.sha256_implementations()[0]
    return (
        "portable C++: this processor has no SHA-256 instructions" if name == "portable" else name
    )


def _compiler() -> str:
    from kvcache.native import build

    return " ".join(build.cxx_command())


def _nvcc() -> str:
    from kvcache.native import build

    home = build.cuda_home()
    if home is None:
        raise LookupError("only CUDA builds need it")
    return f"{home / 'bin' / 'nvcc'}, compiles for {', '.join(build.cuda_archs())}"


def _version(distribution: str, extra: str, purpose: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        raise LookupError(f"pip install 'torch-kvcache[{extra}]', for {purpose}") from None
