# SPDX-License-Identifier: Apache-2.0
"""Stage: reads hardware counters of six kernels with ncu.

Skipped if ncu is missing or lacks permission.
"""

from __future__ import annotations

import csv
import sys

from benchmarks.gpu import machine, process, say
from benchmarks.gpu.sizes import REHEARSAL
from benchmarks.gpu.stages import module

# Cases of `op_cases` that are so large that a 50 MB L2 cache holds only a small part of their data.
KERNELS = (
    "copy_blocks 4 KiB, ids on the device",
    "permute_blocks_ HND of 16",
    "write_kv bf16 NHD",
    "write_kv e4m3 NHD",
    "gather_kv e4m3 NHD",
    "update_block_tables",
)
NUM_BYTES = 512 << 20
METRICS = {
    "gpu__time_duration.sum": "time",
    "dram__bytes_read.sum": "read",
    "dram__bytes_write.sum": "written",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram_percent",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy_percent",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "issue_percent",
    "launch__registers_per_thread": "registers",
}
_FORBIDDEN = ("ERR_NVGPUCTRPERM", "LibraryNotLoaded", "Failed to initialize the profiler")


def main() -> int:
    tool = machine.find_tool("ncu")
    if REHEARSAL or tool is None:
        say.skipped("ncu is not installed: the profiled script runs without it")
        tool = None
    with say.attempt("ncu"):
        watched(tool)
    return say.exit_code()


def watched(tool: str | None) -> None:
    """Collect all counters in a single process, because starting ncu takes most of the time."""
    lines: list[str] = []

    def take(line: str) -> None:
        print("  " + line, flush=True)
        lines.append(line)

    num_bytes = 0 if REHEARSAL else NUM_BYTES
    script = module("benchmarks.gpu.first_contact", "--no-compare", "--bytes", str(num_bytes))
    # The clocks are not changed. Kernels are selected by the project's namespace in their mangled
    # names.
    prefix = (
        tool, "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base",
        "--kernel-name-base", "mangled", "--kernel-name", "regex:kvcache", "--metrics",
        ",".join(METRICS),
    )  # fmt: skip
    command = [*(prefix if tool else ()), *script, "--only", *KERNELS]
    ended = process.run(command, say.seconds_left(), take)
    text = "\n".join(lines)
    reason = next((reason for reason in _FORBIDDEN if reason in text), None)
    if tool and reason:
        say.skipped(f"ncu has no permission to read the counters here ({reason})")
        return
    found = counters(lines)
    for row in found:
        say.row(**row)
        say.learned(
            f"{row['kernel']}: {row.get('time', 0) / 1e3:.1f} us, memory "
            f"{row.get('dram_percent', 0):.0f} % of its peak, {row.get('registers', 0):.0f} registers"
        )
    assert ended.status == "ok", ended.status
    assert found or tool is None, "ncu reported no kernel"
    if tool is None:
        say.row(script="ran", cases=KERNELS)


def counters(lines: list[str]) -> list[dict]:
    """Parse ncu's table, which has one line of names, one line of units, and one line per launch."""
    at = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if at is None:
        return []
    table = list(csv.reader(lines[at:]))
    found = []
    for cells in table[2:]:
        if len(cells) != len(table[0]):
            break
        fields = dict(zip(table[0], cells, strict=True))
        row: dict = {"kernel": fields.get("Kernel Name", "")[:120]}
        for metric, name in METRICS.items():
            try:
                row[name] = float(fields[metric].replace(",", ""))
            except (KeyError, ValueError):
                row[name] = None
        found.append({key: value for key, value in row.items() if value is not None})
    return found


if __name__ == "__main__":
    sys.exit(main())
