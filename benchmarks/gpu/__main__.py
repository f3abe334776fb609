"""`python3 -m benchmarks.gpu`: the command. docs/measuring.md says what each stage answers."""

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
from benchmarks.gpu.stages import STAGES, Stage
from benchmarks.gpu.table import bar_lines, bar_rows, stage_lines

TOTAL_S = 570.0  # the whole stays under ten minutes
# Limits in a rehearsal: kernels run one thread after the other, on few cores.
REHEARSAL_SLOWNESS, REHEARSAL_TOTAL_S = 6.0, 1800.0


def main(arguments: Sequence[str] | None = None) -> int:
    started = time.monotonic()
    args = parse(arguments)
    if args.list:
        for stage in STAGES:
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
    """Runs the first stage, before there is a report that it could be written to."""
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
        help="where the JSON and the logs go, at most eight files; default $GPU_RESULTS, else "
        "benchmarks/results (a rehearsal: build/rehearsal)",
    )
    names = [stage.name for stage in STAGES]
    parser.add_argument(
        "--only",
        nargs="+",
        choices=names,
        metavar="STAGE",
        help="these stages, and the build where one needs it",
    )
    parser.add_argument("--list", action="store_true", help="the stages, their limits, and no more")
    parser.add_argument(
        "--libraries",
        type=Path,
        default=path_from("KVCACHE_LIBRARIES"),
        metavar="DIR",
        help="libraries built elsewhere by `python3 -m benchmarks.gpu.workspace DIR`; they are not "
        "used where their sources differ",
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="all of it on the CUDA runtime without a GPU: sizes are small, times mean nothing",
    )
    return parser.parse_args(arguments)


def path_from(variable: str) -> Path | None:
    """A path from the environment; None where it is not set."""
    value = os.environ.get(variable)
    return Path(value) if value else None


def measure(
    args: argparse.Namespace, looked: tuple[Outcome, list[str], str], folder: Path, started: float
) -> int:
    """Runs the stages in a copy of the checkout; prints the tables. The exit code of the command."""
    facts, lines, status = looked
    known = {row["fact"]: row["value"] for row in facts.rows if "fact" in row}
    about = {"rehearsal": args.rehearse, "commit": machine.commit()}
    about |= {"sources": machine.sources_digest(), "device": known.get("device")}
    if args.rehearse:
        about["note"] = "a rehearsal without a GPU: its figures are not measurements"
    report = Report(results_of(args), report_name(args.rehearse, about["device"]), about)
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
    good &= run.all(chosen(args.only))
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


def chosen(only: Sequence[str] | None) -> list[Stage]:
    """The stages asked for, and the build where one needs it. The facts are there already."""
    if not only:
        return list(STAGES[1:])
    needs_build = any(stage.needs_build for stage in STAGES if stage.name in only)
    names = {*only, "build"} if needs_build else {*only}
    return [stage for stage in STAGES[1:] if stage.name in names]


def environment(args: argparse.Namespace, folder: Path, report: Report) -> dict[str, str]:
    """For every stage: this checkout's copy first, no state of the user's."""
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
    """Where the files go; those of a rehearsal stay away from results."""
    usual = machine.REPO / ("build/rehearsal" if args.rehearse else "benchmarks/results")
    return (args.results or usual).resolve()


def report_name(rehearse: bool, device: str | None) -> str:
    """The name with letters, digits and hyphens only."""
    name = re.sub(r"[^a-z0-9]+", "-", (device or "unknown").lower()).strip("-")
    return "rehearsal" if rehearse else f"gpu-{name}"


def _interrupted(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
