# SPDX-License-Identifier: Apache-2.0
"""Stage: runs the tests marked gpu beside compute-sanitizer's memcheck and racecheck.

Each test file and each tool runs in its own process with its own time limit, so that a crash or a
hang affects only this process. With `--failed`, only the tests that failed in the first lease run,
one after another.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from benchmarks.gpu import machine, process, say
from benchmarks.gpu.report import FIRST_SECTION
from benchmarks.gpu.sizes import REHEARSAL
from benchmarks.gpu.stages import module

_LIMIT_S = 60.0  # time limit of a file
_NUM_AT_ONCE = 12
# Limit the examples of random tests and the steps of race tests, which would otherwise take seconds
# each.
_SHORT = {"HYPOTHESIS_PROFILE": "few", "KVCACHE_TEST_SWAP_STEPS": "60"}
_REHEARSED = ("test_block_copy_op.py", "test_transfer_blocks.py")
# Excluded files: tests of the runtime without a GPU (all skipped on a GPU), and tests of stages.
_LEFT_OUT = ("test_gpu_less.py", "test_call_counts.py", "test_gpu_second_run.py")
_PROGRESS = re.compile(r"([.FEsxX]+) *(?:\[ *\d+%\])?")
_MARKS = re.compile(r"mark\.gpu\b|tests\.backends import")

SMOKE = module("benchmarks.gpu.first_contact", "--no-compare")
# For each tool: the arguments of the smoke test.
_TOOLS = {"memcheck": (), "racecheck": ("--only", "permute_blocks_")}
# Messages of a sanitizer that does not support this machine. They are not kernel errors.
_CANNOT = ("Device not supported", "Unable to find injection library", "No attachable process")


def main(arguments: list[str]) -> int:
    if arguments == ["--failed"]:
        return again()
    files = gpu_test_files(Path())
    if REHEARSAL:
        few = [path for path in files if path.name in _REHEARSED]
        say.skipped(
            f"{len(files) - len(few)} of {len(files)} files: `make gpu-less` runs all of them"
        )
        files = few
    limit_s = _LIMIT_S * (6 if REHEARSAL else 1)
    tool = sanitizer_tool()
    jobs = [partial(sanitized, tool, check, given) for check, given in _TOOLS.items()]
    jobs += [partial(tested, [str(path)], path.name, limit_s) for path in files]
    at_once = max(1, min(_NUM_AT_ONCE, (os.cpu_count() or 1) - 1))
    with ThreadPoolExecutor(at_once) as pool:
        results = [found for found in pool.map(lambda job: job(), jobs) if found is not None]
    passed, broken, skipped = (
        sum(r[key] for r in results) for key in ("passed", "broken", "skipped")
    )
    say.learned(
        f"{passed:,} passed, {broken} failed, {skipped} skipped in {len(files)} files; "
        f"{sum(r['status'] == 'ok' for r in results)} files completed without errors"
    )
    if passed == 0:
        say.failed("no test passed")
    return say.exit_code()


# Tests ------------------------------------------------------------------------------------------------


def again() -> int:
    """Run the tests that failed in the first lease, which $KVCACHE_FIRST_RESULTS describes."""
    path = Path(os.environ.get("KVCACHE_FIRST_RESULTS", ""))
    try:
        rows = json.loads(path.read_text())[FIRST_SECTION]["stages"]["checks"]["rows"]
    except (OSError, ValueError, KeyError) as error:
        say.skipped(f"no results of the first lease in {path}: {type(error).__name__}: {error}")
        return say.exit_code()
    found = 0
    for row in rows:
        if row.get("file") is None or row["status"] == "ok":
            continue
        names = [name.removeprefix("FAILED ").removeprefix("ERROR ") for name in row["names"]]
        files = [path for path in gpu_test_files(Path()) if path.name == row["file"]]
        if names or files:
            found += 1
            tested(names or [str(files[0])], row["file"], _LIMIT_S)
    if not found:
        say.skipped("no test failed in the first lease")
    return say.exit_code()


def gpu_test_files(folder: Path) -> list[Path]:
    """Return the files of a checkout with tests marked gpu. Tests of ops come first."""
    tests = (folder / "tests").rglob("test_*.py"), folder.glob("packages/*/tests/**/test_*.py")
    paths = (path for path in itertools.chain(*tests) if path.name not in _LEFT_OUT)
    found = [path for path in paths if _MARKS.search(path.read_text())]
    return sorted(found, key=lambda path: ("_op" not in path.stem, path.stem))


def tested(wanted: list[str], file: str, limit_s: float) -> dict:
    """Run the tests of one file, report failures, and return the counts."""
    lines: list[str] = []
    command = module(
        "pytest", "-q", "-rfEs", "--tb=short", "-p", "no:cacheprovider", "-m", "gpu", *wanted
    )
    limit_s = min(limit_s, say.seconds_left())
    if limit_s < 5:
        say.failed(f"{file}: not run, no time left")
        return {"file": file, "status": "not run", "passed": 0, "broken": 0, "skipped": 0}
    environment = {**os.environ, **_SHORT, "PYTHONUNBUFFERED": "1"}
    ended = process.run(command, limit_s, lines.append, environment=environment)
    say.log("\n".join(f"  {Path(file).stem}: {line}" for line in lines))
    found = {"file": file, "seconds": round(ended.seconds, 1), **counts(lines)}
    # Exit code 5 means that pytest collected no tests marked gpu.
    found["status"] = "ok" if ended.returncode == 5 and not ended.timed_out else ended.status
    found["names"] = [
        line.split(" - ")[0] for line in lines if line.startswith(("FAILED", "ERROR"))
    ]
    if found["status"] == "ok" and not found["passed"] and found["skipped"]:
        found["status"] = "all skipped"
    say.row(**found)
    if found["status"] != "ok":
        names = ", ".join(name.split("::")[-1] for name in found["names"][:3])
        say.failed(f"{file}: {found['broken']} failed, {found['status']} {names}".strip())
    return found


def counts(lines: list[str]) -> dict:
    """Return the numbers of passed, broken (failed, errors) and skipped tests from pytest's last line.

    If pytest was killed, count the letters that it prints as tests finish.
    """
    last = next((x for x in reversed(lines) if re.search(r"\b\d+ \w+.* in [\d.]+s", x)), None)
    if last is None:
        letters = "".join(found[1] for x in lines if (found := _PROGRESS.fullmatch(x)))
        kinds = {"passed": ".", "failed": "F", "errors": "E", "skipped": "s"}
        number = {word: letters.count(letter) for word, letter in kinds.items()}
    else:
        number = {word: int(count) for count, word in re.findall(r"(\d+) (\w+)", last)}
    broken = sum(number.get(word, 0) for word in ("failed", "error", "errors"))
    return {
        "passed": number.get("passed", 0),
        "broken": broken,
        "skipped": number.get("skipped", 0),
    }


# Sanitizers -------------------------------------------------------------------------------------------


def sanitizer_tool() -> str | None:
    tool = machine.find_tool("compute-sanitizer")
    if REHEARSAL or tool is None:
        say.skipped("compute-sanitizer is not installed: the smoke scripts run without it")
        return None
    return tool


def sanitized(tool: str | None, check: str, arguments: tuple[str, ...]) -> None:
    """Run the smoke test with a tool, and report what it finds."""
    with say.attempt(check):
        checked(tool, check, say.seconds_left(), arguments)


def checked(tool: str | None, check: str, limit_s: float, arguments: tuple[str, ...]) -> None:
    """Run the smoke test with one tool. Raises AssertionError if the tool reports errors."""
    lines: list[str] = []

    def take(line: str) -> None:
        say.log(f"  {check}: {line}")  # indented, so that it is not part of the protocol
        lines.append(line)

    # Check only this project's kernels, whose mangled names contain its namespace. Failing CUDA
    # calls are not reported as errors, because some of them probe the machine's features.
    prefix = (tool, "--tool", check, "--kernel-name", "kns=kvcache", "--error-exitcode", "9")
    prefix += ("--report-api-errors", "no") if check == "memcheck" else ()
    # Caching is disabled, because the caching allocator's large blocks hide accesses outside a tensor.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    if check == "racecheck":
        # Clusters are disabled: racecheck reports each read of another thread block's shared memory
        # that follows an asynchronous copy, even after cluster.sync() of cooperative groups. The
        # interpreter of the PTX checks these reads (docs/gpu_less.md).
        environment["KVCACHE_CLUSTERS"] = "0"
    command = [*(prefix if tool else ()), *SMOKE, *arguments]
    ended = process.run(command, limit_s, take, environment=environment)
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
    sys.exit(main(sys.argv[1:]))
