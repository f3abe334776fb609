# SPDX-License-Identifier: Apache-2.0
"""`python3 -m benchmarks.gpu`: the command line. docs/measuring.md describes the stages."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.gpu import machine, process, rehearsal, workspace
from benchmarks.gpu.report import SECOND as SECOND_NAME
from benchmarks.gpu.report import Outcome, Report
from benchmarks.gpu.run import Run, printed
from benchmarks.gpu.stages import FIRST, SECOND, STAGES, TOTAL_S, Stage, of_lease
from benchmarks.gpu.table import bar_lines, bar_rows, stage_lines
from tests.machinery import roots

# For rehearsals, in which kernel threads run one after another on a few cores: a factor for the
# time limits of stages, and the time limit of a run in seconds.
LIBRARIES = Path("build/gpu-libraries")
REHEARSAL_SLOWNESS, REHEARSAL_TOTAL_S = 6.0, 1800.0


def main(arguments: Sequence[str] | None = None) -> int:
    started = time.monotonic()
    args = parse(arguments)
    if args.list:
        for stage in of_lease(args.lease):
            printed(f"{stage.name:16}{stage.limit_s:5.0f} s  {stage.answers}")
        return 0
    if args.rehearse and not rehearsal.is_inside():
        return rehearsal.again_inside(args, results_of(args))
    lacking = machine.lacks(needs_build=not has_libraries(args))
    facts, lines = Outcome(), []
    if not lacking:
        lines, status = look_at(facts, started)
        lacking = [text for row in facts.rows for text in row.get("lacks", ())]
        if not lacking and not any(row.get("fact") == "device" for row in facts.rows):
            reason = next(reversed(facts.failed + facts.last), "no output")
            lacking = [f"a device that can be used: the facts ended with {status}: {reason}"]
    if lacking:
        print("make gpu: this machine lacks " + "; ".join(lacking), file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, _interrupted)
    try:
        folder = Path(tempfile.mkdtemp(prefix="kvcache-gpu-"))
        try:
            return measure(args, (facts, lines, status), folder, started)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except (OSError, shutil.Error) as error:  # for example, a full disk; earlier results are kept
        print(f"make gpu: {' '.join(str(error).split())[:500]}", file=sys.stderr)
        return 1


def has_libraries(args: argparse.Namespace) -> bool:
    """Return whether there are libraries that were built from these sources, so that nothing is built."""
    if args.libraries is None:
        return False
    try:
        return bool(workspace.carried(args.libraries))
    except ValueError as error:
        printed(f"the libraries are not used: {error}")
        return False


def look_at(facts: Outcome, started: float) -> tuple[list[str], str]:
    """Run the first stage, whose results are recorded later, because the report does not exist yet."""
    lines: list[str] = []

    def take(line: str) -> None:
        lines.append(line)
        facts.take(line)

    slowness = REHEARSAL_SLOWNESS if rehearsal.is_inside() else 1
    limit_s = STAGES[0].limit_s * slowness
    ended = process.run(STAGES[0].command, limit_s, take, folder=machine.REPO)
    return lines, ended.status


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.gpu", description=__doc__)
    parser.add_argument(
        "--results",
        type=Path,
        default=path_from("GPU_RESULTS"),
        metavar="DIR",
        help="folder for the JSON and the logs, at most eight files; default $GPU_RESULTS, else "
        "benchmarks/results (a rehearsal: build/rehearsal)",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="STAGE",
        help="run only these stages, of any lease, and the build if one of them needs it",
    )
    parser.add_argument(
        "--lease",
        type=int,
        choices=(FIRST, SECOND),
        default=FIRST,
        help="1 (default): checks and measurements; 2: what failed in the first lease, alone, and "
        "what may vary, again",
    )
    parser.add_argument(
        "--total", type=float, metavar="S", help="time limit in seconds; default: that of the lease"
    )
    parser.add_argument(
        "--list", action="store_true", help="list the stages and their limits, and exit"
    )
    parser.add_argument(
        "--libraries",
        type=Path,
        default=path_from("KVCACHE_LIBRARIES"),
        metavar="DIR",
        help="use libraries built by `make gpu-libraries`, unless their sources differ; default "
        "$KVCACHE_LIBRARIES, else build/gpu-libraries if it exists",
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="run all stages on the CUDA runtime without a GPU, with small sizes and meaningless times",
    )
    args = parser.parse_args(arguments)
    if args.libraries is None and not args.rehearse and (machine.REPO / LIBRARIES).is_dir():
        args.libraries = machine.REPO / LIBRARIES
    names = [stage.name for stage in STAGES]
    for name in args.only or ():
        if name not in names:
            parser.error(f"argument --only: invalid choice: {name!r} (choose from {names})")
    return args


def path_from(variable: str) -> Path | None:
    """Return a path from an environment variable; None if the variable is not set."""
    value = os.environ.get(variable)
    return Path(value) if value else None


def measure(
    args: argparse.Namespace, looked: tuple[Outcome, list[str], str], folder: Path, started: float
) -> int:
    """Run the stages in a copy of the checkout, print the tables, and return the exit code."""
    facts, lines, status = looked
    known = {row["fact"]: row["value"] for row in facts.rows if "fact" in row}
    about = {"rehearsal": args.rehearse, "commit": machine.commit()}
    about |= {"sources": machine.sources_digest(), "device": known.get("device")}
    if args.rehearse:
        about["note"] = "a rehearsal without a GPU: its figures are not measurements"
    report = Report(
        results_of(args), report_name(args, about["device"]), about, args.only is not None
    )
    workspace.make(folder)
    if args.rehearse:
        printed(f"REHEARSAL: {about['note']}")
    printed(first_line(args, known))
    run = Run(
        report,
        folder,
        environment(args, folder, report),
        args.total or (REHEARSAL_TOTAL_S if args.rehearse else TOTAL_S[args.lease]),
        slowness=REHEARSAL_SLOWNESS if args.rehearse else 1,
        started=started,
    )
    good = run.record(STAGES[0], facts, lines, status)
    good &= run.all(chosen(args.lease, args.only))
    report.contents["bars"] = bar_rows(report.contents)
    report.save()
    printed("")
    for line in stage_lines(report.contents):
        printed(line)
    printed(f"\nREHEARSAL: {about['note']}" if args.rehearse else "")
    for line in bar_lines(report.contents["bars"]):
        printed(line)
    printed(f"{'ok' if good else 'FAILED'}: {report.path} after {run.seconds:.0f} s")
    return 0 if good else 1


def first_line(args: argparse.Namespace, known: Mapping[str, object]) -> str:
    """Return the libraries, driver and clocks of a run in one line."""
    built = "built here"
    if args.libraries:
        with contextlib.suppress(OSError, ValueError):
            built = f"{args.libraries} ({workspace.built_with(args.libraries)})"
    clocks = known.get("pcie_link_and_clocks") or "unknown"
    return (
        f"commit {machine.commit()}; libraries: {built}; torch {known.get('torch')}, "
        f"driver {known.get('driver')}; PCIe link and clocks: {clocks}"
    )


def chosen(lease: int, only: Sequence[str] | None) -> list[Stage]:
    """Return all stages of a lease or only the requested stages, plus the build if any stage needs
    it.

    The facts stage is excluded because it has already run.
    """
    if not only:
        return of_lease(lease)[1:]
    stages = STAGES[1:]
    needs_build = any(stage.needs_build for stage in stages if stage.name in only)
    names = {*only, "build"} if needs_build else {*only}
    return [stage for stage in stages if stage.name in names]


def environment(args: argparse.Namespace, folder: Path, report: Report) -> dict[str, str]:
    """Return the environment variables of all stages.

    The copy of the checkout comes first in PYTHONPATH, and user settings are removed.
    """
    path = os.pathsep.join(filter(None, [roots.python_path(folder), os.environ.get("PYTHONPATH")]))
    found = {
        **os.environ,
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "KVCACHE_CALIBRATION_TO": str(of_first(report, "-calibration.json")),
        "KVCACHE_FIRST_RESULTS": str(of_first(report, ".json")),
    }
    for name in ("KVCACHE_JIT", "KVCACHE_CALIBRATION", "KVCACHE_CHECKED"):
        found.pop(name, None)
    if args.libraries:
        found["KVCACHE_LIBRARIES"] = str(args.libraries.resolve())
    if args.rehearse:
        found["KVCACHE_REHEARSAL"] = "1"
    return found


def of_first(report: Report, ending: str) -> Path:
    """Return the path of a result of the first lease, in the folder for results or, if it is not there,
    among the committed results.
    """
    name = report.name.removesuffix(SECOND_NAME) + ending
    path, committed = report.folder / name, machine.REPO / "benchmarks" / "results" / name
    is_known = report.name.endswith(SECOND_NAME) and not path.exists() and committed.exists()
    return committed if is_known else path


def results_of(args: argparse.Namespace) -> Path:
    """Return the folder for results. By default, rehearsals do not write to benchmarks/results."""
    usual = machine.REPO / ("build/rehearsal" if args.rehearse else "benchmarks/results")
    return (args.results or usual).resolve()


def report_name(args: argparse.Namespace, device: str | None) -> str:
    """Return the name of the report, which contains the device's name in letters, digits and hyphens."""
    name = re.sub(r"[^a-z0-9]+", "-", (device or "unknown").lower()).strip("-")
    return ("rehearsal" if args.rehearse else f"gpu-{name}") + SECOND_NAME * (args.lease == SECOND)


def _interrupted(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
