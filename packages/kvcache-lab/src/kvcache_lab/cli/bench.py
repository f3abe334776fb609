# SPDX-License-Identifier: Apache-2.0
"""`kvcache bench`: measures page copies on this machine, and calibrates swaps."""

from __future__ import annotations

import argparse
import importlib.util
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from kvcache.cli.errors import MissingError, OutputError, UsageError
from kvcache.cli.output import say, show, writing
from kvcache.cli.parts import Command
from kvcache_exchange.cli.parsing import device_name, number

if TYPE_CHECKING:
    import torch

    from kvcache_lab.bandwidth import Rate


def add_bench_options(sub: argparse.ArgumentParser) -> None:
    """Add the options of `kvcache bench`."""
    sub.add_argument(
        "--device",
        default=None,
        type=device_name,
        help="device to swap with host memory; default cuda if available, else cpu",
    )
    sub.add_argument(
        "--mib",
        default=256,
        metavar="N",
        type=number("--mib", 8, 65_536),
        help="MiB to copy per measurement; default 256",
    )
    sub.add_argument(
        "--pool-mib",
        default=2048,
        metavar="N",
        type=number("--pool-mib", 8, 1_048_576),
        help="MiB of the page pools on device and host; default 2048",
    )
    sub.add_argument(
        "--calibrate",
        action="store_true",
        help="find the fastest copy method per fragment size, and store it for swaps",
    )
    sub.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run_bench(args: argparse.Namespace) -> int:
    """Run `kvcache bench` and return the exit code."""
    if importlib.util.find_spec("torch") is None:
        raise MissingError("bench needs torch: pip install torch")
    import torch

    from kvcache.worker.pages.pinning import check_host_memory
    from kvcache.worker.swap.calibration import calibration_of
    from kvcache_lab.bandwidth import host_rates_bytes

    has_cuda = torch.cuda.is_available()
    device = torch.device(args.device or ("cuda" if has_cuda else "cpu"))
    if device.type == "cuda" and not has_cuda:
        raise MissingError(f"--device is {args.device}: torch finds no CUDA device here")
    if args.calibrate and device.type != "cuda":
        raise MissingError("there is no CUDA device: nothing to calibrate")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise MissingError(f"--device is {device}: torch finds {torch.cuda.device_count()} devices")
    num_bytes = args.mib << 20
    try:
        if not args.calibrate:
            calibration_of(device)  # reject an invalid calibration file before the measurements
        check_host_memory(host_rates_bytes(num_bytes))
        if device.type == "cuda":
            _check_pool(args, device)
        return _measure(args, device, num_bytes)
    except ValueError as error:
        raise UsageError(str(error)) from None
    except MemoryError as error:
        raise UsageError(f"--mib is {args.mib}: expected less, {error}") from None


def _check_pool(args: argparse.Namespace, device: torch.device) -> None:
    """Raise ValueError if the benchmark's pools and buffers do not fit on the device or the host."""
    import torch

    from kvcache.worker.pages.pinning import check_host_memory
    from kvcache_lab.bandwidth import device_rates_bytes

    needed, on_host = device_rates_bytes(args.mib << 20, args.pool_mib << 20)
    free, _ = torch.cuda.mem_get_info(device)
    try:
        check_host_memory(on_host)
        if needed > free:
            raise MemoryError(
                f"this needs {needed / 2**30:,.1f} GiB, {device} has {free / 2**30:,.1f} GiB free"
            )
    except MemoryError as error:
        raise ValueError(f"--pool-mib is {args.pool_mib}: expected less, {error}") from None


def _measure(args: argparse.Namespace, device: torch.device, num_bytes: int) -> int:
    import torch

    from kvcache.worker.swap.calibration import calibration_of, path_for
    from kvcache_lab.bandwidth import Pools, calibrate, device_rates, host_rates

    report: dict[str, object] = {"device": str(device)}
    rates = list(host_rates(num_bytes))
    if device.type == "cuda":
        pools = Pools(device, num_bytes, args.pool_mib << 20)
    if args.calibrate:
        found = calibrate(pools, lambda rate: say(_line(rate)))
        path = path_for(found.machine)
        try:
            found.save(path)
        except OSError as error:
            raise OutputError(f"{path} cannot be written: {error.strerror}") from None
        report |= {"calibration": asdict(found), "stored": str(path)}
        say(f"stored in {path}")
    if device.type == "cuda":
        report["machine"] = torch.cuda.get_device_name(device)
        report["calibration"] = asdict(calibration_of(device))
        rates += device_rates(pools)
    report["rates"] = [{**asdict(rate), "share": rate.share} for rate in rates]
    if args.json:
        with writing():
            print(json.dumps(report))
    else:
        show(_table(rates))
    return 0


def _cells(rate: Rate) -> tuple[str, ...]:
    how = (
        rate.method
        if rate.num_thread_blocks is None
        else f"{rate.method} ({rate.num_thread_blocks})"
    )
    number = "" if rate.num_fragments is None else f"{rate.num_fragments:,} x "
    return (
        rate.direction,
        f"{number}{rate.fragment // 1024:,} KiB",
        how,
        f"{rate.gb_per_s:.1f}",
        f"{rate.contiguous_gb_per_s:.1f}",
        f"{rate.share:.0%}",
    )


def _line(rate: Rate) -> str:
    direction, fragment, how, ours, whole, share = _cells(rate)
    return f"{direction:5} {fragment:>18} {how:12} {ours:>6} GB/s, {share} of {whole}"


def _table(rates: list[Rate]) -> object:
    from rich.table import Table

    table = Table(title="page copies, relative to one contiguous copy of the same size")
    for name, justify in (
        ("direction", "left"),
        ("fragment", "right"),
        ("method (thread blocks)", "left"),
        ("GB/s", "right"),
        ("contiguous", "right"),
        ("share", "right"),
    ):
        table.add_column(name, justify=justify)
    for rate in rates:
        table.add_row(*_cells(rate))
    return table


COMMAND = Command(
    "measure page copies on this machine, relative to one contiguous copy",
    run_bench,
    add_bench_options,
)
