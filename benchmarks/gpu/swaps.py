"""Stage: `kvcache bench --calibrate`, each figure told as it is measured; swaps beside their limit."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.gpu import say, sizes
from kvcache import bench
from kvcache.worker.calibration import Calibration

_BYTES = 256 << 20  # moved per measurement
_TOLD = (4 << 10, 16 << 10, 1 << 20)  # fragments of which the reader hears at once


def main() -> int:
    device = torch.device("cuda", torch.cuda.current_device())
    num_bytes = sizes.scaled(_BYTES, 256 << 10)
    pool_bytes = sizes.pool_bytes(bench.POOL_BYTES)
    found: list[Calibration] = []
    with say.attempt("calibration"):
        found.append(bench.calibrate(device, num_bytes, tell_trial, pool_bytes))
        tell(found[0])
    with say.attempt("swaps"):
        # Without a calibration of this machine, swaps go as they would before the first one.
        rates = bench.device_rates(
            device,
            num_bytes,
            calibration=(found or [None])[0],
            rounds=sizes.repeats(7),
            pool_bytes=pool_bytes,
        )
        for rate in rates:
            say.row(kind="swap", **asdict(rate), share=rate.share)
            if rate.pattern == "scattered" and rate.fragment in _TOLD:
                say.learned(
                    f"swap {rate.direction}, {rate.fragment >> 10:,} KiB by {rate.method}: "
                    f"{rate.gb_per_s:.1f} of {rate.contiguous_gb_per_s:.1f} GB/s, {rate.share:.0%}"
                )
    return say.exit_code()


def tell_trial(rate: bench.Rate) -> None:
    """One trial of the calibration."""
    say.row(kind="trial", **asdict(rate), share=rate.share)


def tell(found: Calibration) -> None:
    """Keeps a calibration with the results; the user's own stays as it is."""
    path = os.environ.get("KVCACHE_CALIBRATION_TO")
    if path:
        found.save(Path(path))
    say.row(kind="calibration", **asdict(found))
    for direction, table in (("out", found.out), ("in", found.in_)):
        _, steps = table[-1]  # of swaps with many fragments
        told = ", ".join(f"from {size >> 10:,} KiB {method}" for size, method in steps)
        say.learned(f"{direction}, many fragments: {told}")
    say.learned(f"{found.num_thread_blocks} thread blocks are enough for the kernel on the bus")


if __name__ == "__main__":
    sys.exit(main())
