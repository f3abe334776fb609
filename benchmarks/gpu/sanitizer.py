# SPDX-License-Identifier: Apache-2.0
"""Stage: runs compute-sanitizer's memcheck on each op, and racecheck on the shared-memory kernel."""

from __future__ import annotations

import re
import sys

from benchmarks.gpu import machine, process, say
from benchmarks.gpu.sizes import REHEARSAL
from benchmarks.gpu.stages import module

_SMOKE = module("benchmarks.gpu.first_contact", "--no-compare")
# For each tool: its name, its fraction of the stage's time, and the arguments of the smoke test.
_CHECKS = (("memcheck", 0.7, ()), ("racecheck", 0.95, ("--only", "permute_blocks_")))
# Messages of a sanitizer that does not support this machine. They are not kernel errors.
_CANNOT = ("Device not supported", "Unable to find injection library", "No attachable process")


def main() -> int:
    tool = machine.find_tool("compute-sanitizer")
    if REHEARSAL or tool is None:
        say.skipped("compute-sanitizer is not installed: the smoke scripts run without it")
        tool = None
    for check, share, arguments in _CHECKS:
        with say.attempt(check):
            checked(tool, check, share * say.seconds_left(), arguments)
    return say.exit_code()


def checked(tool: str | None, check: str, limit_s: float, arguments: tuple[str, ...]) -> None:
    """Run the smoke test with one tool. Raises AssertionError if the tool reports errors."""
    lines: list[str] = []

    def take(line: str) -> None:
        print("  " + line, flush=True)  # indented, so that it is not part of the protocol
        lines.append(line)

    # Check only this project's kernels, whose mangled names contain its namespace. Failing CUDA
    # calls are not reported as errors, because some of them probe the machine's features.
    prefix = (tool, "--tool", check, "--kernel-name", "kns=kvcache", "--error-exitcode", "9")
    prefix += ("--report-api-errors", "no") if check == "memcheck" else ()
    ended = process.run([*(prefix if tool else ()), *_SMOKE, *arguments], limit_s, take)
    text = "\n".join(lines)
    if tool and any(reason in text for reason in _CANNOT):
        say.skipped(f"{check}: compute-sanitizer does not work on this machine")
        return
    found = re.findall(r"========= (?:ERROR|RACECHECK) SUMMARY: .*", text)
    summary = found[-1].removeprefix("========= ").lower() if found else ended.status
    say.row(tool=check if tool else None, script=check, status=ended.status, summary=summary)
    assert ended.status == "ok", f"{ended.status}; {summary}"
    assert found or not tool, "no summary came"
    say.learned(f"{check}: {summary}" if tool else f"the script of {check} runs")


if __name__ == "__main__":
    sys.exit(main())
