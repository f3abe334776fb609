# SPDX-License-Identifier: Apache-2.0
"""The stages of both leases, in order, with their time limits."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

FIRST, SECOND = 1, 2
TOTAL_S = {FIRST: 450.0, SECOND: 240.0}  # time limit of each lease in seconds


@dataclass(frozen=True)
class Stage:
    """A stage, which is run in its own process. `log`: the section whose log file the stage writes
    to.

    `needs`: required Python packages, without which the stage counts as failed. `needs_build`:
    whether the stage is skipped if the libraries could not be built. `leases`: the leases that
    include the stage; it can be run with `--only` in any case.
    """

    name: str
    limit_s: float
    command: tuple[str, ...]
    log: str
    answers: str
    environment: dict[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    needs_build: bool = True
    leases: tuple[int, ...] = (FIRST,)


def module(name: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs a module with this Python."""
    return (sys.executable, "-m", name, *arguments)


def of_lease(number: int) -> list[Stage]:
    """Return the stages of a lease, facts first."""
    return [stage for stage in STAGES if number in stage.leases]


# The limits allow for a cold first import of torch. The build gets a long limit, because everything
# else depends on it. Most stages end long before their limits.
STAGES = (
    Stage(
        "facts", 40, module("benchmarks.gpu.facts"), "setup",
        "which hardware and software does the machine have", needs_build=False,
        leases=(FIRST, SECOND),
    ),
    Stage(
        "build", 120, module("benchmarks.gpu.build"), "setup",
        "do the libraries load; how long does a build take", needs_build=False,
        leases=(FIRST, SECOND),
    ),
    Stage(
        "first-contact", 30, module("benchmarks.gpu.first_contact"), "checks",
        "does each op give the same results on the GPU as on the CPU; is host memory pinned",
        {"CUDA_LAUNCH_BLOCKING": "1"},
    ),
    Stage(
        "checks", 90, module("benchmarks.gpu.checks"), "checks",
        "do the tests marked gpu pass; does a kernel access memory out of bounds, or race",
        needs=("pytest", "hypothesis"),
    ),
    Stage(
        "kernels", 45, module("benchmarks.gpu_kernels"), "rates",
        "how fast are the kernels, compared with a copy on the device",
    ),
    Stage(
        "swaps", 60, module("benchmarks.gpu.swaps"), "rates",
        "how fast are swaps by fragment size, compared with one contiguous pinned copy",
    ),
    Stage(
        "beside-matmul", 30, module("benchmarks.gpu.beside_matmul"), "rates",
        "how much do swaps and a matrix product slow each other down",
    ),
    Stage(
        "load-beside-step", 40, module("benchmarks.gpu.load_beside_step"), "transfers",
        "are loads ordered with captured steps; how much do they slow the steps down",
    ),
    Stage(
        "tcp", 40, module("benchmarks.gpu.device_transfers", "tcp"), "transfers",
        "does TCP move device memory correctly through pinned staging; how fast, in how many launches",
    ),
    Stage(
        "endurance", 30, module("benchmarks.gpu.endurance"), "tools",
        "do repeated and very large batches of the copy engine work",
    ),
    Stage(
        "replay", 40, module("benchmarks.gpu.replay"), "tools",
        "does the replay verify every block on the GPU",
    ),
    # The second lease: what failed in the first, alone; what was measured once, again.
    Stage(
        "failed-tests", 60, module("benchmarks.gpu.checks", "--failed"), "checks",
        "do the tests that failed in the first lease fail alone, with blocking launches",
        {"CUDA_LAUNCH_BLOCKING": "1"}, needs=("pytest", "hypothesis"), leases=(SECOND,),
    ),
    Stage(
        "swaps-again", 60, module("benchmarks.gpu.swaps", "--again"), "rates",
        "how much do the bandwidths of swaps vary between two more runs", leases=(SECOND,),
    ),
    # A stage that needs a package that a lease does not have.
    Stage(
        "nixl", 110, module("benchmarks.gpu.device_transfers", "nixl"), "transfers",
        "does NIXL move device memory between processes correctly; how fast, directly and packed",
        leases=(),
    ),
)  # fmt: skip
