# SPDX-License-Identifier: Apache-2.0
"""Stage: runs the tests marked gpu, with one pytest process per file, so that a crash affects only
one file.
"""

from __future__ import annotations

import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.gpu import process, say
from benchmarks.gpu.sizes import REHEARSAL
from benchmarks.gpu.stages import module

_LIMIT_S = 60.0  # time limit per file
# Limit the examples of random tests and the steps of race tests, which would otherwise take seconds
# each.
_SHORT = {"HYPOTHESIS_PROFILE": "few", "KVCACHE_TEST_SWAP_STEPS": "60"}
_REHEARSED = ("test_block_copy_op.py", "test_transfer_blocks.py")
# Excluded files: tests of the runtime without a GPU (all skipped on a GPU), and tests of stages in
# the second run.
_LEFT_OUT = ("test_gpu_less.py", "test_call_counts.py", "test_gpu_second_run.py")
_PROGRESS = re.compile(r"([.FEsxX]+) *(?:\[ *\d+%\])?")
_MARKS = re.compile(r"mark\.gpu\b|tests\.backends import")


def main() -> int:
    files = gpu_test_files(Path("tests"))
    if REHEARSAL:
        few = [path for path in files if path.name in _REHEARSED]
        say.skipped(
            f"{len(files) - len(few)} of {len(files)} files: `make gpu-less` runs all of them"
        )
        files = few
    limit_s = _LIMIT_S * (6 if REHEARSAL else 1)
    cores = os.cpu_count() or 1
    with ThreadPoolExecutor(max(1, min(6, cores // 2))) as pool:
        results = list(pool.map(lambda path: tested(path, limit_s), files))
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


def gpu_test_files(folder: Path) -> list[Path]:
    """Return the files with tests marked gpu. Tests of ops come first."""
    paths = (path for path in folder.rglob("test_*.py") if path.name not in _LEFT_OUT)
    found = [path for path in paths if _MARKS.search(path.read_text())]
    return sorted(found, key=lambda path: ("_op" not in path.stem, path.stem))


def tested(path: Path, limit_s: float) -> dict:
    """Run the tests of one file, report failures, and return the counts."""
    lines: list[str] = []
    command = module(
        "pytest", "-q", "-rfEs", "--tb=short", "-p", "no:cacheprovider", "-m", "gpu", str(path)
    )
    limit_s = min(limit_s, say.seconds_left())
    if limit_s < 5:
        say.failed(f"{path.name}: not run, no time left")
        return {"file": path.name, "status": "not run", "passed": 0, "broken": 0, "skipped": 0}
    environment = {**os.environ, **_SHORT, "PYTHONUNBUFFERED": "1"}
    ended = process.run(command, limit_s, lines.append, environment=environment)
    say.log("\n".join(f"  {path.stem}: {line}" for line in lines))
    found = {"file": path.name, "seconds": round(ended.seconds, 1), **counts(lines)}
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
        say.failed(f"{path.name}: {found['broken']} failed, {found['status']} {names}".strip())
    return found


def counts(lines: list[str]) -> dict:
    """Return the numbers of passed, broken (failed, errors) and skipped tests from pytest's last line.

    If pytest was killed, count the letters that it prints as tests finish.
    """
    last = next((x for x in reversed(lines) if re.search(r"\b\d+ \w+.* in [\d.]+s", x)), None)
    if last is None:
        letters = "".join(found[1] for x in lines if (found := _PROGRESS.fullmatch(x)))
        return {
            "passed": letters.count("."),
            "broken": letters.count("F") + letters.count("E"),
            "skipped": letters.count("s"),
        }
    number = {word: int(count) for count, word in re.findall(r"(\d+) (\w+)", last)}
    broken = sum(number.get(word, 0) for word in ("failed", "error", "errors"))
    return {
        "passed": number.get("passed", 0),
        "broken": broken,
        "skipped": number.get("skipped", 0),
    }


if __name__ == "__main__":
    sys.exit(main())
