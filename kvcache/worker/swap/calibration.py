# SPDX-License-Identifier: Apache-2.0
"""Calibrations, which record a machine's fastest copy method for each direction, number of
fragments and fragment size.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from kvcache.checks import shown

# kernel: a kernel accesses pinned host memory. copy_engine: the copy engine copies fragment by
# fragment. staging: on the device, a kernel packs pages into the host layout, and the copy engine
# transfers the packed pages.
KERNEL = "kernel"
COPY_ENGINE = "copy_engine"
STAGING = "staging"
METHODS = (KERNEL, COPY_ENGINE, STAGING)
OUT = "out"  # device to host
IN = "in"  # host to device
DIRECTIONS = (OUT, IN)

Steps = tuple[tuple[int, str], ...]  # (minimum fragment size in bytes, method); sizes ascend from 0
Table = tuple[tuple[int, Steps], ...]  # (minimum number of fragments, steps); numbers ascend from 0
VERSION = 2  # file version; version 1 did not contain the number of fragments


@dataclass(frozen=True)
class Calibration:
    """Maps a swap's direction, number of fragments and fragment size to a copy method.

    Args:
        machine: Name of the machine on which the calibration was measured.
        out: Methods for swaps from device to host, as a tuple of (minimum number of fragments,
            ((minimum fragment size in bytes, method), ...)). Both minimums ascend from 0.
        in_: Methods for swaps from host to device, in the same form.
        num_thread_blocks: Number of thread blocks in a kernel that accesses host memory.

    Example:
        >>> DEFAULT.method("in", 16 * 1024, 1000), DEFAULT.method("in", 64 * 1024, 1000)
        ('kernel', 'copy_engine')
        >>> DEFAULT.method("in", 16 * 1024, num_fragments=10_000)
        'staging'
    """

    machine: str
    out: Table
    in_: Table
    num_thread_blocks: int = 8

    def __post_init__(self) -> None:
        for name in ("out", "in_"):
            table = tuple(
                (int(count), _checked(name, steps)) for count, steps in getattr(self, name)
            )
            _check_ascending(
                f"{name} begins at", [count for count, _ in table], "numbers of fragments"
            )
            object.__setattr__(self, name, table)
        if not isinstance(self.num_thread_blocks, int) or self.num_thread_blocks < 1:
            raise ValueError(f"num_thread_blocks is {self.num_thread_blocks}: expected 1 or more")

    def method(self, direction: str, fragment_bytes: float, num_fragments: int) -> str:
        """Return the method for `num_fragments` fragments of `fragment_bytes` bytes each."""
        return _last_up_to(_last_up_to(self._table(direction), num_fragments), fragment_bytes)

    def methods(self, direction: str) -> set[str]:
        """Return all methods that the calibration can select for a direction."""
        return {method for _, steps in self._table(direction) for _, method in steps}

    def _table(self, direction: str) -> Table:
        return self.out if direction == OUT else self.in_

    def save(self, path: Path) -> None:
        """Write the calibration to a file atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}.tmp")
        content = {"version": VERSION, **asdict(self)}
        draft.write_text(json.dumps(content, indent=1) + "\n")
        draft.replace(path)


def _checked(name: str, steps: Iterable[tuple[int, str]]) -> Steps:
    steps = tuple((int(size), str(method)) for size, method in steps)
    _check_ascending(f"{name} has steps that begin at", [size for size, _ in steps], "sizes")
    for _, method in steps:
        if method not in METHODS:
            raise ValueError(f"{name} has {shown(method)}: expected one of {', '.join(METHODS)}")
    return steps


def _check_ascending(what: str, numbers: list[int], expected: str) -> None:
    if not numbers or numbers[0] != 0 or numbers != sorted(set(numbers)):
        raise ValueError(f"{what} {numbers}: expected ascending {expected} from 0")


def _last_up_to(steps: tuple, number: float) -> object:
    return steps[max(bisect_right([start for start, _ in steps], number) - 1, 0)][1]


# Measured on an H200 (PCIe Gen5), benchmarks/results/gpu-nvidia-h200.json. A kernel with 2 or more
# thread blocks reaches 93 to 95 % of the bus with fragments of any size, and its submission takes a
# constant time. The copy engine reaches 99 %, but its submission takes 0.8 to 1 us per fragment and, from
# host to device, up to 5 us for fragments of 16 KiB. Two kernels that swap in
# opposite directions reach only 61 of 101 GB/s together. A kernel that swaps out reaches 96 GB/s together
# with the copy engine, which swaps in. Therefore, large swap-ins of small fragments are staged.
DEFAULT = Calibration(
    machine="NVIDIA H200, PCIe Gen5",
    out=((0, ((0, KERNEL), (128 * 1024, COPY_ENGINE))),),
    in_=(
        (0, ((0, KERNEL), (64 * 1024, COPY_ENGINE))),
        (8192, ((0, STAGING), (64 * 1024, COPY_ENGINE))),
    ),
    num_thread_blocks=4,
)


def path_for(machine: str) -> Path:
    """Return a machine's calibration file: `$KVCACHE_CALIBRATION`, or a file in `~/.cache/kvcache`."""
    given = os.environ.get("KVCACHE_CALIBRATION")
    if given:
        return Path(given)
    name = re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-")
    return cache_folder() / f"calibration-{name}.json"


def cache_folder() -> Path:
    """Return the folder for files that can be recomputed, `~/.cache/kvcache` by default."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvcache"


def load(path: Path) -> Calibration:
    """Load a saved calibration. Raises a ValueError that names the file if the file is invalid."""
    try:
        found = json.loads(path.read_text())
        version = found.pop("version", 1) if isinstance(found, dict) else None
        if version != VERSION:
            raise ValueError(
                f"version is {version}: expected {VERSION}; run `kvcache bench --calibrate` again"
            )
        return Calibration(**found)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path} is not a valid calibration: {error}") from error


def calibration_of(device: torch.device) -> Calibration:
    """Return the calibration that was measured on this machine, or else the built-in calibration.

    Warns if the file was measured on another machine. Raises ValueError for an invalid file.
    """
    if device.type != "cuda":
        return DEFAULT
    machine = torch.cuda.get_device_name(device)
    path = path_for(machine)
    if not path.exists() and not os.environ.get("KVCACHE_CALIBRATION"):
        return DEFAULT
    found = load(path)
    if found.machine != machine:
        warnings.warn(
            f"{path} was measured on {found.machine}, but this machine is {machine}: "
            "run `kvcache bench --calibrate` on this machine",
            RuntimeWarning,
            stacklevel=2,
        )
    return found
