# SPDX-License-Identifier: Apache-2.0
"""`python3 -m benchmarks.gpu`: the command line. docs/measuring.md describes the stages."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu import machine, process, rehearsal, workspace
from benchmarks.gpu.report import Outcome, Report
from benchmarks.gpu.run import Run, printed
from benchmarks.gpu.stages import FIRST, SECOND, STAGES, Stage, of_run
from benchmarks.gpu.table import bar_lines, bar_rows, stage_lines

TOTAL_S = 570.0  # time limit, in seconds, that keeps each run under ten minutes
# For rehearsals, in which kernel threads run one after another on a few cores: a factor for the
# time limits of stages, and the time limit of a run in seconds.
REHEARSAL_SLOWNESS, REHEARSAL_TOTAL_S = 6.0, 1800.0


def main(arguments: Sequence[str] | None = None) -> int:
    started = time.monotonic()
    args = parse(arguments)
    if args.list:
        for stage in of_run(args.run):
            printed(f"{stage.name:16}{stage.limit_s:5.0f} s  {stage.answers}")
        return 0
    if args.rehearse and not rehearsal.is_inside():
        return rehearsal.again_inside(args, results_of(args))
    lacking = machine.lacks(needs_build=args.libraries is None)
    facts, lines = Outcome(), []
    if not lacking:
        lines, status = look_at(facts, started)
        lacking = [text for row in facts.rows for text in row.get("lacks", ())]
    if lacking:
        print("make gpu: this machine lacks " + "; ".join(lacking), file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, _interrupted)
    folder = Path(tempfile.mkdtemp(prefix="kvcache-gpu-"))
    try:
        return measure(args, (facts, lines, status), folder, started)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def look_at(facts: Outcome, started: float) -> tuple[list[str], str]:
    """Run the first stage, whose results are recorded later, because the report does not exist
    yet.
    """
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
        help="run only these stages, and the build if one of them needs it",
    )
    parser.add_argument(
        "--second",
        dest="run",
        action="store_const",
        const=SECOND,
        default=FIRST,
        help="second run: transfers between processes, loads during captured steps, FlashInfer",
    )
    parser.add_argument(
        "--list", action="store_true", help="list the stages and their limits, and exit"
    )
    parser.add_argument(
        "--libraries",
        type=Path,
        default=path_from("KVCACHE_LIBRARIES"),
        metavar="DIR",
        help="use libraries built by `python3 -m benchmarks.gpu.workspace DIR`, "
        "unless their sources differ",
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="run all stages on the CUDA runtime without a GPU, with small sizes and meaningless times",
    )
    args = parser.parse_args(arguments)
    names = [stage.name for stage in of_run(args.run)]
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
    report = Report(results_of(args), report_name(args, about["device"]), about)
    workspace.make(folder)
    if args.rehearse:
        printed(f"REHEARSAL: {about['note']}")
    run = Run(
        report,
        folder,
        environment(args, folder, report),
        REHEARSAL_TOTAL_S if args.rehearse else TOTAL_S,
        slowness=REHEARSAL_SLOWNESS if args.rehearse else 1,
        started=started,
    )
    good = run.record(STAGES[0], facts, lines, status)
    good &= run.all(chosen(args.run, args.only))
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


def chosen(number: int, only: Sequence[str] | None) -> list[Stage]:
    """Return all stages of a run or only the requested stages, plus the build if any stage needs
    it.

    The facts stage is excluded because it has already run.
    """
    stages = of_run(number)[1:]
    if not only:
        return stages
    needs_build = any(stage.needs_build for stage in stages if stage.name in only)
    names = {*only, "build"} if needs_build else {*only}
    return [stage for stage in stages if stage.name in names]


def environment(args: argparse.Namespace, folder: Path, report: Report) -> dict[str, str]:
    """Return the environment variables of all stages.

    The copy of the checkout comes first in PYTHONPATH, and user settings are removed.
    """
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    found = {
        **os.environ,
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "KVCACHE_CALIBRATION_TO": str(report.folder / f"{report.name}-calibration.json"),
    }
    for name in ("KVCACHE_JIT", "KVCACHE_CALIBRATION", "KVCACHE_CHECKED"):
        found.pop(name, None)
    if args.libraries:
        found["KVCACHE_LIBRARIES"] = str(args.libraries.resolve())
    if args.rehearse:
        found["KVCACHE_REHEARSAL"] = "1"
    return found


def results_of(args: argparse.Namespace) -> Path:
    """Return the folder for results. By default, rehearsals do not write to benchmarks/results."""
    usual = machine.REPO / ("build/rehearsal" if args.rehearse else "benchmarks/results")
    return (args.results or usual).resolve()


def report_name(args: argparse.Namespace, device: str | None) -> str:
    """Return the name of the report, which contains the device's name in letters, digits and
    hyphens.
    """
    name = re.sub(r"[^a-z0-9]+", "-", (device or "unknown").lower()).strip("-")
    return ("rehearsal" if args.rehearse else f"gpu-{name}") + "-second" * (args.run == SECOND)


def _interrupted(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
