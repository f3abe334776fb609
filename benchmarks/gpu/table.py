# SPDX-License-Identifier: Apache-2.0
"""The final tables of a run: the stages, and the measured ratios with their targets."""

from __future__ import annotations

from collections.abc import Iterator

# Fragment sizes of swaps in bytes. The targets of the project are fractions of the bandwidth of a
# contiguous pinned copy or, for received blocks, of a device copy.
_SMALLEST, _SMALL = 4 << 10, 16 << 10
BAR_SMALLEST, BAR_SMALL, BAR_RECEIVE = 0.75, 0.90, 0.85


def stage_lines(contents: dict) -> Iterator[str]:
    """Yield one line per stage: status, seconds, the seconds that do not depend on the device, limit,
    and the last message; then the sums.
    """
    yield f"{'stage':20}{'seconds':>9}{'of these fixed':>16}{'limit':>7}  result"
    total = total_fixed = 0.0
    for name, stage in contents["stages"].items():
        lines = stage.get("failed") or stage.get("learned") or stage.get("skipped") or [""]
        last = f": {lines[-1]}" if lines[-1] else ""
        parts = {row["timed"]: row["seconds"] for row in stage["rows"] if "timed" in row}
        fixed = sum(parts.values())
        total, total_fixed = total + stage["seconds"], total_fixed + fixed
        yield (
            f"{name:20}{stage['seconds']:9.1f}{fixed:16.1f}{stage['limit_s']:7.0f}  "
            f"{mark(stage['status'])}{last[:150]}"
        )
        for part, seconds in parts.items():
            yield f"  {part:18}{'':9}{seconds:16.1f}"
    yield f"{'sum':20}{total:9.1f}{total_fixed:16.1f}"


def mark(status: str) -> str:
    """Return the status, with failures highlighted."""
    return status if status in ("ok", "skipped") else f"FAILED ({status})"


def bar_rows(contents: dict) -> list[dict]:
    """Return the measurements that have a target.

    Each row has GB/s, limit, ratio, target, and whether the target is met.
    """
    # The last measurement of each kind, which is the calibrated one if the stage calibrated.
    swaps: dict[tuple, dict] = {}
    for rate in rows_of(contents, "swaps") + rows_of(contents, "swaps-again"):
        if rate.get("kind") != "swap":
            continue
        bar = bar_of_swap(rate["fragment"])
        name = f"swap {rate['direction']}, {rate['fragment'] >> 10:,} KiB, {rate['method']}"
        case = (rate["direction"], rate["fragment"])
        swaps[case] = _bar_row(name, rate["gb_per_s"], rate["contiguous_gb_per_s"], bar)
    found = list(swaps.values())
    for row in rows_of(contents, "kernels"):
        if row.get("kernel") == "permute_blocks_" and row.get("of_copy"):
            limit = row["gb_per_s"] / row["of_copy"]
            found.append(_bar_row(f"receive, {row['case']}", row["gb_per_s"], limit, BAR_RECEIVE))
    return found


def bar_of_swap(fragment: int) -> float | None:
    """Return the target of swaps with this fragment size, as a fraction of the contiguous copy."""
    if fragment >= _SMALL:
        return BAR_SMALL
    return BAR_SMALLEST if fragment == _SMALLEST else None


def _bar_row(name: str, rate: float, limit: float, bar: float | None) -> dict:
    ratio = rate / limit if limit else 0.0
    reached = None if bar is None else ratio >= bar
    return {
        "name": name, "gb_per_s": rate, "beside": limit, "ratio": ratio, "bar": bar,
        "reached": reached,
    }  # fmt: skip


def bar_lines(rows: list[dict]) -> Iterator[str]:
    """Yield the lines of a table of the measurements."""
    if not rows:
        return
    yield f"{'measured':62}{'GB/s':>8}{'beside':>9}{'ratio':>7}{'bar':>6}"
    for row in rows:
        bar = "-" if row["bar"] is None else f"{row['bar']:.0%}"
        missed = "  MISSED" if row["reached"] is False else ""
        yield (
            f"{row['name'][:61]:62}{row['gb_per_s']:8.1f}{row['beside']:9.1f}{row['ratio']:7.0%}"
            f"{bar:>6}{missed}"
        )


def rows_of(contents: dict, stage: str) -> list[dict]:
    """Return the rows of a stage; empty if it did not run."""
    return contents["stages"].get(stage, {}).get("rows", [])
