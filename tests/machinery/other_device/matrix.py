# SPDX-License-Identifier: Apache-2.0
"""Runs the cases on the device "sealed" and on the CPU, in a subprocess, because a failing case may
kill the process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tests.machinery import roots
from tests.machinery.shared import REPO

_LIMIT_S = 900


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
    """Run the cases with these names, or all cases.

    If a case kills the process, a new process runs the remaining cases.
    """
    rows: list[Row] = []
    command = [
        sys.executable,
        "-X",
        "faulthandler",
        "-m",
        "tests.machinery.other_device",
        "--child",
    ]
    environment = {**os.environ, "PYTHONPATH": roots.python_path(), "OMP_NUM_THREADS": "1"}
    left = list(names) or all_names()
    while left:
        process = subprocess.run(
            [*command, *left], cwd=REPO, env=environment, capture_output=True, text=True,
            timeout=_LIMIT_S,
        )  # fmt: skip
        lines = [line for line in process.stdout.splitlines() if line.startswith('{"name"')]
        rows += [Row(**json.loads(line)) for line in lines]
        left = left[len(lines) :]
        if left and process.returncode == 0:
            raise RuntimeError(f"no answer for {left[0]}: {process.stderr[-2000:]}")
        if left:
            died = f"the process ended with {process.returncode}: {process.stderr[-2000:]}"
            rows.append(Row(left.pop(0), "DIES", died))
    return rows


def all_names() -> list[str]:
    """Return the names of all cases without running them."""
    from tests.machinery.other_device.cases import CASES

    return list(CASES)


def child(names: Sequence[str]) -> None:
    """Run the cases with these names, and print each row as JSON."""
    from tests.machinery.other_device.cases import CASES
    from tests.machinery.other_device.device import NAME, native

    device = native()
    done: dict[object, Row] = {}
    for name in names:
        case = CASES[name]
        if case.run not in done:
            before = device.fallbacks()
            device.set_fallback(case.ops_needed)
            begin = time.monotonic()
            outcome, detail = _tried(case, NAME)
            used = [op for op, n in device.fallbacks().items() if n > before.get(op, 0)]
            if ours := [op for op in used if op.startswith("kvcache::")]:
                outcome, detail = "WRONG", f"{', '.join(ours)} ran by the boxed fallback"
            if os.environ.get("OTHER_DEVICE_TIMES"):
                detail += f" ({time.monotonic() - begin:.1f} s)"
            done[case.run] = Row(name, outcome, detail)
        row = done[case.run]
        print(json.dumps(asdict(Row(name, row.outcome, row.detail))), flush=True)


def _tried(case: object, device: str) -> tuple[str, str]:
    import torch

    try:
        if case.refusal is not None:
            try:
                case.run(device)
            except (TypeError, ValueError, RuntimeError) as error:
                is_right = str(error).startswith(case.refusal)
                return ("refuses" if is_right else "WRONG"), str(error)
            return "WRONG", f"expected an error: {case.refusal}"
        expected = case.run("cpu")
        difference = differing(expected, case.run(device), torch)
        if difference:
            return "WRONG", difference
        return "works", "by the device's own operators too" if case.ops_needed else "by copies"
    except Exception as error:
        return "FAILS", f"{type(error).__name__}: {error}"[:600]


def differing(mine: object, other: object, torch: object, at: str = "result") -> str | None:
    """Describe where two results differ, or return None.

    Tensors are compared bytewise on any device.
    """
    if isinstance(mine, torch.Tensor):
        if not isinstance(other, torch.Tensor) or mine.dtype != other.dtype:
            return f"{at} is {other!r}: expected {mine!r}"
        sides = [x.cpu().contiguous() for x in (mine, other)]
        same = sides[0].shape == sides[1].shape
        same = same and bytes(
            sides[0].view(torch.uint8).numpy() if sides[0].numel() else b""
        ) == bytes(sides[1].view(torch.uint8).numpy() if sides[1].numel() else b"")
        return None if same else f"{at} has other bytes"
    if isinstance(mine, list | tuple):
        if len(mine) != len(other):
            return f"{at} has {len(other)} entries: expected {len(mine)}"
        pairs = zip(mine, other)
        found = (differing(a, b, torch, f"{at}[{i}]") for i, (a, b) in enumerate(pairs))
        return next(filter(None, found), None)
    if hasattr(mine, "tolist"):
        mine, other = mine.tolist(), other.tolist()
    return None if mine == other else f"{at} is {other!r}: expected {mine!r}"
