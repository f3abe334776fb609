# SPDX-License-Identifier: Apache-2.0
"""Runs stages one after another. A stage that fails, hangs or dies does not affect the others."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.gpu import machine, process
from benchmarks.gpu.report import Outcome, Report
from benchmarks.gpu.stages import Stage

_LEAST_S = 5.0  # minimum time left to start a stage


class Run:
    """A run, with its folder, environment, total time limit and report."""

    def __init__(
        self,
        report: Report,
        folder: Path,
        environment: dict[str, str],
        total_s: float,
        *,
        slowness: float = 1,
        started: float | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """`folder`: the stages' working directory. `slowness`: a factor for the time limits of stages."""
        self.report, self._folder, self._environment = report, folder, environment
        self._total_s, self._slowness = total_s, slowness
        self._started = time.monotonic() if started is None else started
        self._say = say or printed

    @property
    def seconds(self) -> float:
        """Return the seconds since the start of the run."""
        return time.monotonic() - self._started

    def all(self, stages: Sequence[Stage]) -> bool:
        """Run the stages. Return False if any stage failed."""
        ended = [self.one(stage) for stage in stages]
        return all(ended)

    def one(self, stage: Stage) -> bool:
        """Run one stage and record its results. Return False if it failed."""
        self._say(f"== {stage.name}: {stage.answers}")
        missing = [name for name in stage.needs if not machine.has_module(name)]
        left_s = max(self._total_s - self.seconds, 0)
        limit_s = min(stage.limit_s * self._slowness, left_s)
        outcome = Outcome()
        if missing:
            return self._ended(stage, outcome, f"lacks the Python package {missing[0]}", 0, limit_s)
        if stage.needs_build and not self._built():
            return self._ended(stage, outcome, "not run: no libraries were built", 0, limit_s)
        if left_s < _LEAST_S:
            return self._ended(stage, outcome, "not run: no time left", 0, limit_s)
        start = time.monotonic()
        try:
            status = self._process(stage, outcome, limit_s)
        except OSError as error:
            status = f"could not be run: {error}"
        except BaseException:  # on a signal or Ctrl-C, keep the results so far
            self._ended(stage, outcome, "interrupted", time.monotonic() - start, limit_s)
            raise
        return self._ended(stage, outcome, status, time.monotonic() - start, limit_s)

    def record(self, stage: Stage, outcome: Outcome, lines: list[str], status: str) -> bool:
        """Record a stage that ran before the report existed."""
        self._say(f"== {stage.name}: {stage.answers}")
        log = self.report.log(stage.log, stage.name, " ".join(stage.command))
        for line in lines:
            log.line(line)
        status = judged(status, outcome)
        log.close(status)
        for text in outcome.learned:
            self._say(f"   {text}")
        return self._ended(stage, outcome, status, self.seconds, stage.limit_s)

    def _process(self, stage: Stage, outcome: Outcome, limit_s: float) -> str:
        log = self.report.log(stage.log, stage.name, " ".join(stage.command))
        status = "interrupted"

        def take(line: str) -> None:
            log.line(line)
            shown = outcome.take(line)
            if shown is not None:
                self._say(f"   {shown}")

        try:
            ended = process.run(
                stage.command,
                limit_s,
                take,
                environment={
                    **self._environment,
                    **stage.environment,
                    "KVCACHE_STAGE_LIMIT": f"{limit_s:.1f}",
                },
                folder=self._folder,
            )
            status = ended.status
        finally:
            log.close(status)
        return judged(status, outcome)

    def _ended(
        self, stage: Stage, outcome: Outcome, status: str, seconds: float, limit_s: float
    ) -> bool:
        good = status in ("ok", "skipped")
        self.report.contents["stages"][stage.name] = outcome.as_dict(status, seconds, limit_s)
        self.report.contents["seconds"] = round(self.seconds, 1)
        self.report.save()
        if not good and (not outcome.failed or stage.name == "build"):
            for line in outcome.last:
                self._say(f"   | {line}")
        self._say(f"   {status}, {seconds:.1f} s of {limit_s:.0f}")
        return good

    def _built(self) -> bool:
        """Return whether the libraries loaded. Also true if the build was skipped."""
        build = self.report.contents["stages"].get("build")
        return build is None or any("libraries" in row for row in build["rows"])


def judged(status: str, outcome: Outcome) -> str:
    """Return a stage's status, given the status of its process and its results."""
    if outcome.failed and status in ("ok", "exit code 1"):
        return f"{len(outcome.failed)} failed"
    if status == "ok" and outcome.skipped and not outcome.rows:
        return "skipped"
    return status


def printed(text: str) -> None:
    """Print and flush. The run continues even if the reader has closed the pipe."""
    with contextlib.suppress(OSError):
        print(text.encode("utf-8", "replace").decode(), flush=True)
