"""Which way of moving pages is the fastest on a machine, by direction and size of fragments."""

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

# A kernel over pinned memory; the copy engine, piece by piece; relayout on the device into pages as the
# host has them, and the copy engine between those.
KERNEL, COPY_ENGINE, STAGING = METHODS = ("kernel", "copy_engine", "staging")
OUT, IN = DIRECTIONS = ("out", "in")  # device to host, host to device

Steps = tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class Calibration:
    """For each direction (smallest fragment in bytes, method), ascending from 0; the machine's name.

    `num_thread_blocks`: of the kernel, where the host is one side.

    >>> DEFAULT.method("in", 16 * 1024), DEFAULT.method("in", 64 * 1024)
    ('kernel', 'copy_engine')
    """

    machine: str
    out: Steps
    in_: Steps
    num_thread_blocks: int = 8

    def __post_init__(self) -> None:
        for name in ("out", "in_"):
            steps = tuple((int(size), str(method)) for size, method in getattr(self, name))
            sizes = [size for size, _ in steps]
            if not steps or sizes[0] != 0 or sizes != sorted(set(sizes)):
                raise ValueError(f"{name} begins at {sizes}: expected ascending sizes from 0")
            for _, method in steps:
                if method not in METHODS:
                    raise ValueError(f"{name} has {method!r}: expected one of {', '.join(METHODS)}")
            object.__setattr__(self, name, steps)
        if not isinstance(self.num_thread_blocks, int) or self.num_thread_blocks < 1:
            raise ValueError(f"num_thread_blocks is {self.num_thread_blocks}: expected 1 or more")

    def method(self, direction: str, fragment_bytes: float) -> str:
        """The method for fragments of so many bytes."""
        steps = self.out if direction == OUT else self.in_
        return steps[max(bisect_right([size for size, _ in steps], fragment_bytes) - 1, 0)][1]

    def save(self, path: Path) -> None:
        """Writes it, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}.tmp")
        draft.write_text(json.dumps(asdict(self), indent=1) + "\n")
        draft.replace(path)


# Published figures of an H100 (PCIe Gen5), not our own: below about 28 KiB per fragment the copy engine
# falls from 40 to 6 GB/s host to device, and a kernel reaches the bus; device to host the copy engine is
# the faster, so that small fragments are first put together.
DEFAULT = Calibration(
    machine="NVIDIA H100, PCIe Gen5 (published figures)",
    out=((0, STAGING), (28 * 1024, COPY_ENGINE)),
    in_=((0, KERNEL), (28 * 1024, COPY_ENGINE)),
)


def steps_of(measured: Iterable[tuple[int, str]]) -> Steps:
    """(fragment size, its fastest method), ascending, as steps: from the middle between two sizes on."""
    steps: list[tuple[int, str]] = []
    before = 0
    for size, method in measured:
        if not steps:
            steps.append((0, method))
        elif steps[-1][1] != method:
            steps.append(((before + size) // 2, method))
        before = size
    return tuple(steps)


def path_for(machine: str) -> Path:
    """Where a machine's calibration is kept: $KVCACHE_CALIBRATION, or a file in ~/.cache/kvcache."""
    given = os.environ.get("KVCACHE_CALIBRATION")
    if given:
        return Path(given)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvcache"
    name = re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-")
    return cache / f"calibration-{name}.json"


def load(path: Path) -> Calibration:
    """A calibration that was saved. ValueError, naming the file, for anything else."""
    try:
        found = json.loads(path.read_text())
        return Calibration(**found)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path} holds no calibration: {error}") from error


def calibration_of(device: torch.device) -> Calibration:
    """What was measured on this machine, else the built-in one.

    A warning where it was measured on another one; ValueError for a file that holds none.
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
            f"{path} was measured on {found.machine}, this is {machine}: "
            "`kvcache bench --calibrate` measures here",
            RuntimeWarning,
            stacklevel=2,
        )
    return found
