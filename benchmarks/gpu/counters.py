"""Stage: hardware counters of six kernels, by ncu; skipped where it is missing or may not read them."""

from __future__ import annotations

import csv
import sys

from benchmarks.gpu import machine, process, say
from benchmarks.gpu.sizes import REHEARSAL
from benchmarks.gpu.stages import module

# Case of `op_cases`, how many times larger: some ten megabytes and more, so that memory is what counts.
KERNELS = (
    ("copy_blocks 4 KiB, ids on the device", 256),
    ("permute_blocks_ HND of 16", 256),
    ("write_kv bf16 NHD", 256),
    ("write_kv e4m3 NHD", 256),
    ("gather_kv e4m3 NHD", 256),
    ("update_block_tables", 64),
)
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
        say.skipped("no ncu here: the scripts that it would watch run without it")
        tool = None
    for number, (case, size) in enumerate(KERNELS):
        left = say.seconds_left()
        if left < 4:
            say.skipped(f"{case}: no time left")
            continue
        with say.attempt(case):
            # What one leaves of its share is for the others.
            if not watched(
                tool, case, 1 if REHEARSAL else size, left / (len(KERNELS) - number) * 2
            ):
                break
    return say.exit_code()


def watched(tool: str | None, case: str, size: int, limit_s: float) -> bool:
    """Counters of one kernel; False where none can be had on this machine."""
    lines: list[str] = []

    def take(line: str) -> None:
        print("  " + line, flush=True)
        lines.append(line)

    script = module(
        "benchmarks.gpu.first_contact", "--no-compare", "--only", case, "--size", str(size)
    )
    # The clocks stay as they are; the first launches of this project's kernel.
    prefix = (
        tool, "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base",
        "--kernel-name-base", "mangled", "--kernel-name", "regex:kvcache", "--launch-count", "1",
        "--metrics", ",".join(METRICS),
    )  # fmt: skip
    ended = process.run(
        [*(prefix if tool else ()), *script], min(limit_s, say.seconds_left()), take
    )
    text = "\n".join(lines)
    reason = next((reason for reason in _FORBIDDEN if reason in text), None)
    if tool and reason:
        say.skipped(f"ncu may not read the counters here ({reason})")
        return False
    assert ended.status == "ok", ended.status
    if tool is None:
        say.row(case=case, counters=None)
        return True
    found = counters(lines)
    assert found, "ncu told of no kernel"
    for row in found:
        say.row(case=case, **row)
    first = found[0]
    say.learned(
        f"{case}: {first.get('time', 0) / 1e3:.1f} us, memory {first.get('dram_percent', 0):.0f} % of "
        f"its peak, {first.get('registers', 0):.0f} registers"
    )
    return True


def counters(lines: list[str]) -> list[dict]:
    """The rows of ncu's table: names, units, then one line per launch."""
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
