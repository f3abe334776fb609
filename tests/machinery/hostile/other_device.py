# SPDX-License-Identifier: Apache-2.0
"""Runs cases on the device "sealed" (other_device.cpp), which is neither CPU nor CUDA, and on the
CPU. Every part must work equally or raise a clear error.
"""

from __future__ import annotations

import fcntl
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from tests.machinery.hostile import children
from tests.machinery.hostile.state import difference, state_of
from tests.machinery.shared import REPO

NAME = "sealed"
_SOURCE = Path(__file__).with_name("other_device.cpp")


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


@dataclass(frozen=True)
class Row:
    """The result for a public name. The outcome is "works", "refuses", or a description of the
    fault.
    """

    name: str
    outcome: str
    detail: str = ""

    @property
    def is_wrong(self) -> bool:
        return self.outcome not in ("works", "refuses")


def table(names: Sequence[str] = ()) -> list[Row]:
    """Run the cases whose names start with these, or all cases."""
    from tests.machinery.hostile.other_device_cases import CASES

    names = [name for name in CASES if name.startswith(tuple(names or [""]))]
    lines = children.run("device", ",".join(names), {"OMP_NUM_THREADS": "1"})
    return [Row(names[at], *outcome) for at, _, *outcome in lines if outcome]


def child(names: str, first: int, first_n: int) -> Iterator[list]:
    """Run the cases with these names. Yield a line before and after each."""
    from tests.machinery.hostile.other_device_cases import CASES

    device = native()
    done: dict[object, tuple[str, str]] = {}
    for at, name in list(enumerate(names.split(",")))[first + first_n - 1 :]:
        yield [at, 1]
        case = CASES[name]
        if case.run not in done:
            before = device.fallbacks()
            device.set_fallback(case.ops_needed)
            done[case.run] = _tried(case)
            used = [op for op, n in device.fallbacks().items() if n > before.get(op, 0)]
            if ours := [op for op in used if op.startswith("kvcache::")]:
                done[case.run] = "WRONG", f"{', '.join(ours)} ran by the boxed fallback"
        yield [at, 1, *done[case.run]]


def _tried(case: object) -> tuple[str, str]:
    try:
        if case.refusal is not None:
            try:
                case.run(NAME)
            except (TypeError, ValueError, RuntimeError) as error:
                is_right = str(error).startswith(case.refusal)
                return ("refuses" if is_right else "WRONG"), str(error)
            return "WRONG", f"expected an error: {case.refusal}"
        found = difference(state_of(case.run("cpu")), state_of(case.run(NAME)))
        if found is not None:
            return "WRONG", found
        return "works", "by the device's own operators too" if case.ops_needed else "by copies"
    except Exception as error:
        return "FAILS", f"{type(error).__name__}: {error}"[:600]
