# SPDX-License-Identifier: Apache-2.0
"""Stage: reports facts about the machine.

Unavailable facts are omitted. Fails if there is no CUDA device.
"""

from __future__ import annotations

import os
import platform
import sys
import warnings
from collections.abc import Callable

from benchmarks.gpu import machine, say, sizes


def main() -> int:
    import torch

    version = tuple(
        int("".join(filter(str.isdigit, x)) or 0) for x in torch.__version__.split(".")[:2]
    )
    lacking = []
    if version < (2, 10):
        lacking.append(f"torch 2.10 or newer (this is {torch.__version__})")
    if not torch.version.cuda:
        lacking.append(f"a CUDA build of torch (this is {torch.__version__})")
    else:
        with warnings.catch_warnings(
            record=True
        ) as told:  # for example, that the driver is too old
            warnings.simplefilter("always")
            is_available = torch.cuda.is_available()
        if not is_available:
            reason = "".join(
                f" ({' '.join(str(each.message).split())[:300]})" for each in told[-1:]
            )
            driver = machine.driver()
            lacking.append(f"a CUDA device that torch can use; driver {driver}{reason}")
    if lacking:
        say.row(lacks=lacking)
        return 1
    for facts in (of_device, of_host, of_tools):
        for name, fact in facts().items():
            with say.attempt(name):
                say.row(fact=name, value=fact())
    properties = torch.cuda.get_device_properties(0)
    say.learned(
        f"{properties.name}: {properties.multi_processor_count} multiprocessors, "
        f"{properties.total_memory / 2**30:.0f} GiB, L2 {properties.L2_cache_size / 2**20:.0f} MiB, "
        f"driver {machine.driver()}; {os.cpu_count()} cores, "
        f"{sizes.available_host_bytes() / 2**30:.0f} GiB free on the host"
    )
    if "kvcache.native.load" in sys.modules:  # this import builds missing libraries
        say.failed("the facts of the machine loaded the native libraries")
    return say.exit_code()


def of_device() -> dict[str, Callable[[], object]]:
    import torch

    properties = torch.cuda.get_device_properties(0)
    query = "pcie.link.gen.current,pcie.link.width.current,clocks.mem,clocks.max.mem,clocks.sm,"
    query += "clocks.max.sm"
    smi = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    return {
        "device": lambda: properties.name,
        "arch": lambda: f"{properties.major}{properties.minor}",
        "multiprocessors": lambda: properties.multi_processor_count,
        "memory_bytes": lambda: properties.total_memory,
        "l2_bytes": lambda: properties.L2_cache_size,
        "driver": machine.driver,
        "pcie_link_and_clocks": lambda: machine.output_of(smi) or None,
    }


def of_host() -> dict[str, Callable[[], object]]:
    return {
        "system": platform.platform,
        "processor": machine.processor,
        "cores": os.cpu_count,
        "memory_free_bytes": sizes.available_host_bytes,
    }


def of_tools() -> dict[str, Callable[[], object]]:
    import torch

    nvcc = machine.find_tool("nvcc")
    packages = ("pybind11", "setuptools", "pytest", "hypothesis", "ninja")
    tools = ("git", "make", "nvidia-smi", "nvcc", "g++", "ninja", "compute-sanitizer", "ncu")
    return {
        "python": lambda: sys.version.split()[0],
        "torch": lambda: torch.__version__,
        "cuda_of_torch": lambda: torch.version.cuda,
        "nvcc": lambda: machine.output_of([nvcc, "--version"]).splitlines()[-1] if nvcc else None,
        "tools": lambda: {name: machine.find_tool(name) is not None for name in tools},
        "packages": lambda: {name: machine.has_module(name) for name in packages},
    }


if __name__ == "__main__":
    sys.exit(main())
