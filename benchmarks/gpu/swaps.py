# SPDX-License-Identifier: Apache-2.0
"""Stage: measures the bandwidth of swaps and of a pinned copy before and after calibration."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.gpu import say, sizes
from kvcache.worker.swap import bandwidth
from kvcache.worker.swap.calibration import DEFAULT, Calibration

_BYTES = 256 << 20  # bytes moved per measurement
_LEAST_S = 1.0  # minimum time left to start a measurement
_TOLD = (4 << 10, 16 << 10, 1 << 20)  # sizes of fragments that are reported to the user


def main() -> int:
    device = torch.device("cuda", torch.cuda.current_device())
    num_bytes = sizes.scaled(_BYTES, 256 << 10)
    pool_bytes = sizes.pool_bytes(bandwidth.POOL_BYTES)
    # The figures with targets are measured first, with the built-in calibration, so that they are
    # always available.
    with say.attempt("swaps"):
        report_swaps(device, num_bytes, DEFAULT, ("scattered",), pool_bytes)
    found: list[Calibration] = []
    with say.attempt("calibration"):
        found.append(bandwidth.calibrate(device, num_bytes, report_trial, pool_bytes))
        report(found[0])
    with say.attempt("swaps as calibrated"):
        patterns = ("scattered", "runs") if found else ("runs",)
        report_swaps(device, num_bytes, (found or [DEFAULT])[0], patterns, pool_bytes)
    return say.exit_code()


def report_swaps(
    device: torch.device,
    num_bytes: int,
    calibration: Calibration,
    patterns: tuple[str, ...],
    pool_bytes: int,
) -> None:
    """Measure swaps with the calibration's methods until the time is used up.

    Results are reported immediately.
    """
    is_built_in = calibration is DEFAULT
    rates = bandwidth.device_rates(
        device,
        num_bytes,
        calibration=calibration,
        patterns=patterns,
        rounds=sizes.repeats(7),
        pool_bytes=pool_bytes,
    )
    for rate in rates:
        say.row(kind="swap", **asdict(rate), share=rate.share, calibrated=not is_built_in)
        if rate.pattern == "scattered" and rate.fragment in _TOLD:
            say.learned(
                f"swap {rate.direction}, {rate.fragment >> 10:,} KiB by {rate.method}"
                f"{'' if is_built_in else ', calibrated'}: "
                f"{rate.gb_per_s:.1f} of {rate.contiguous_gb_per_s:.1f} GB/s, {rate.share:.0%}; "
                f"submitted in {rate.submit_us or 0:.0f} us"
            )
        if say.seconds_left() < _LEAST_S:
            say.skipped(f"swaps after {rate.pattern}, {rate.fragment >> 10:,} KiB: no time left")
            return


def report_trial(rate: bandwidth.Rate) -> None:
    """Report one trial of the calibration. The calibration ends when no time is left."""
    say.row(kind="trial", **asdict(rate), share=rate.share)
    if say.seconds_left() < _LEAST_S:
        raise TimeoutError("no time left")


def report(found: Calibration) -> None:
    """Save a calibration with the results, without changing the user's own file."""
    path = os.environ.get("KVCACHE_CALIBRATION_TO")
    if path:
        found.save(Path(path))
    say.row(kind="calibration", **asdict(found))
    for direction, table in (("out", found.out), ("in", found.in_)):
        _, steps = table[-1]  # the entry for swaps with many fragments
        text = ", ".join(f"from {size >> 10:,} KiB {method}" for size, method in steps)
        say.learned(f"{direction}, many fragments: {text}")
    say.learned(f"{found.num_thread_blocks} thread blocks are enough for the kernel on the bus")


if __name__ == "__main__":
    sys.exit(main())
