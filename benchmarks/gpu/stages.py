"""The stages of a run, in order, each with its time limit."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Stage:
    """A process of its own. `log`: the section whose log file it writes to.

    `needs`: Python packages without which it is skipped as failed. `needs_build`: it is left out where
    the libraries could not be built.
    """

    name: str
    limit_s: float
    command: tuple[str, ...]
    log: str
    answers: str
    environment: dict[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    needs_build: bool = True


def module(name: str, *arguments: str) -> tuple[str, ...]:
    """The command that runs a module with this Python."""
    return (sys.executable, "-m", name, *arguments)


# The limits leave room for a first, cold import of torch. All else depends on the build, so it may take
# long, and with it the limits together are longer than a run may take, since most stages end far before
# theirs. With carried libraries the last stage has 50 s even where all others take all of their time.
STAGES = (
    Stage(
        "facts", 40, module("benchmarks.gpu.facts"), "setup",
        "what the machine is", needs_build=False,
    ),
    Stage(
        "build", 90, module("benchmarks.gpu.build"), "setup",
        "do the libraries load, how long does a build take", needs_build=False,
    ),
    Stage(
        "first-contact", 25, module("benchmarks.gpu.first_contact"), "checks",
        "does each op do on the GPU what it does on the CPU; is host memory pinned",
        {"CUDA_LAUNCH_BLOCKING": "1"},
    ),
    Stage(
        "sanitizer", 60, module("benchmarks.gpu.sanitizer"), "checks",
        "does a kernel read or write outside its memory, or race in shared memory",
        # The caching allocator's large blocks would hide what lies outside a tensor.
        {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    ),
    Stage(
        "kernel-tests", 110, module("benchmarks.gpu.kernel_tests"), "checks",
        "do the tests marked gpu pass", needs=("pytest", "hypothesis"),
    ),
    Stage(
        "kernels", 40, module("benchmarks.gpu_kernels"), "kernels",
        "how fast are the kernels, beside a copy on the device",
    ),
    Stage(
        "swaps", 75, module("benchmarks.gpu.swaps"), "swaps",
        "how fast are swaps by size of fragment, beside one contiguous pinned copy",
    ),
    Stage(
        "bus", 45, module("benchmarks.gpu.bus_sweep"), "swaps",
        "what do thread blocks, pool size, huge pages and batch size change",
    ),
    Stage(
        "beside-matmul", 30, module("benchmarks.gpu.beside_matmul"), "swaps",
        "how much do swaps and a matrix product slow each other down",
    ),
    Stage(
        "counters", 40, module("benchmarks.gpu.counters"), "tools",
        "what do the hardware counters of six kernels say",
    ),
    Stage(
        "endurance", 30, module("benchmarks.gpu.endurance"), "tools",
        "do repeated batches, graph capture, and polling during a capture hold",
    ),
    Stage(
        "jit-and-replay", 200, module("benchmarks.gpu.jit_and_replay"), "tools",
        "does the build at first use work; does the replay verify every block on the GPU",
    ),
)  # fmt: skip
