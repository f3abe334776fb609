# SPDX-License-Identifier: Apache-2.0
"""The stages of both runs, in order, with their time limits."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

FIRST, SECOND = 1, 2  # the second run contains the stages that do not fit into the first


@dataclass(frozen=True)
class Stage:
    """A stage, which is run in its own process. `log`: the section whose log file the stage writes
    to.

    `needs`: required Python packages, without which the stage counts as failed. `needs_build`:
    whether the stage is skipped if the libraries could not be built. `runs`: the runs that include
    the stage.
    """

    name: str
    limit_s: float
    command: tuple[str, ...]
    log: str
    answers: str
    environment: dict[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    needs_build: bool = True
    runs: tuple[int, ...] = (FIRST,)


def module(name: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs a module with this Python."""
    return (sys.executable, "-m", name, *arguments)


def of_run(number: int) -> list[Stage]:
    """Return the stages of a run, facts first."""
    return [stage for stage in STAGES if number in stage.runs]


# The limits allow for a cold first import of torch. The build gets a long limit, because everything
# else depends on it. The sum of the limits therefore exceeds the time of a run, but most stages end
# long before their limits. With prebuilt libraries, the last stage has 50 s even if all others use
# their full time.
STAGES = (
    Stage(
        "facts", 40, module("benchmarks.gpu.facts"), "setup",
        "which hardware and software does the machine have", needs_build=False, runs=(FIRST, SECOND),
    ),
    Stage(
        "build", 90, module("benchmarks.gpu.build"), "setup",
        "do the libraries load; how long does a build take", needs_build=False,
        runs=(FIRST, SECOND),
    ),
    Stage(
        "first-contact", 25, module("benchmarks.gpu.first_contact"), "checks",
        "does each op give the same results on the GPU as on the CPU; is host memory pinned",
        {"CUDA_LAUNCH_BLOCKING": "1"},
    ),
    Stage(
        "sanitizer", 60, module("benchmarks.gpu.sanitizer"), "checks",
        "does a kernel access memory out of bounds, or race in shared memory",
        # Caching is disabled, because the caching allocator's large blocks hide accesses outside a
        # tensor.
        {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    ),
    Stage(
        "kernel-tests", 110, module("benchmarks.gpu.kernel_tests"), "checks",
        "do the tests marked gpu pass", needs=("pytest", "hypothesis"),
    ),
    Stage(
        "kernels", 40, module("benchmarks.gpu_kernels"), "kernels",
        "how fast are the kernels, compared with a copy on the device",
    ),
    Stage(
        "swaps", 75, module("benchmarks.gpu.swaps"), "swaps",
        "how fast are swaps by fragment size, compared with one contiguous pinned copy",
    ),
    Stage(
        "bus", 45, module("benchmarks.gpu.bus_sweep"), "swaps",
        "how do thread blocks, pool size, huge pages and batch size affect the bandwidth",
    ),
    Stage(
        "beside-matmul", 30, module("benchmarks.gpu.beside_matmul"), "swaps",
        "how much do swaps and a matrix product slow each other down",
    ),
    Stage(
        "counters", 40, module("benchmarks.gpu.counters"), "tools",
        "what are the hardware counters of six kernels",
    ),
    Stage(
        "endurance", 30, module("benchmarks.gpu.endurance"), "tools",
        "do repeated batches, graph capture, and polling during a capture work",
    ),
    Stage(
        "jit-and-replay", 200, module("benchmarks.gpu.jit_and_replay"), "tools",
        "does the build at first use work; does the replay verify every block on the GPU",
    ),
    Stage(
        "nixl", 110, module("benchmarks.gpu.device_transfers", "nixl"), "transfers",
        "does NIXL move device memory between processes correctly; how fast, directly and packed",
        runs=(SECOND,),
    ),
    Stage(
        "gloo", 70, module("benchmarks.gpu.device_transfers", "gloo"), "transfers",
        "does gloo move device memory correctly through pinned staging; how fast, in how many launches",
        runs=(SECOND,),
    ),
    Stage(
        "load-beside-step", 80, module("benchmarks.gpu.load_beside_step"), "steps",
        "are loads ordered with captured steps; how much do they slow the steps down",
        runs=(SECOND,),
    ),
    Stage(
        "flashinfer", 230, module("benchmarks.gpu.flashinfer_against_gathered"), "attention",
        "does FlashInfer over pages agree with attention over gathered contexts; how fast are both",
        runs=(SECOND,),
    ),
)  # fmt: skip
