# SPDX-License-Identifier: Apache-2.0
"""Runs cases in processes that may crash, and makes each allocation of each call fail in turn."""

from __future__ import annotations

import collections
import ctypes
import faulthandler
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

from kvcache.native import build
from tests.machinery import roots
from tests.machinery.compilers import cxx
from tests.machinery.out_of_memory.trial import BROKEN, Case, Trial, answer, plain
from tests.machinery.shared import REPO

MOST_SECONDS = 10  # time limit per trial, because a loop over a corrupted list may never end

# Possible results of a failed allocation.
UNCHANGED, BROKEN_SAID = "unchanged", "broken and reported"
CHANGED, BROKEN_SILENT = "changed", "broken and not reported"
WRONG_ERROR, DIED = "another error than MemoryError", "died"
IS_WRONG = (CHANGED, BROKEN_SILENT, WRONG_ERROR, DIED)


def library() -> Path:
    """Build the library with the failing `operator new` if necessary, and return its path."""
    source = Path(__file__).with_name("failing_new.cpp")
    out = REPO / "build" / "out_of_memory" / "libfailing_new.so"
    if not out.exists() or out.stat().st_mtime < source.stat().st_mtime:
        out.parent.mkdir(parents=True, exist_ok=True)
        new = out.with_suffix(f".{os.getpid()}")
        command = f"{cxx(build)} -O1 -std=c++17 -shared -fPIC -o {new} {source}".split()
        subprocess.run(command, check=True)
        new.rename(out)
    return out


@functools.cache
def _new() -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(library()))
    loaded.fail_new_at.argtypes = [ctypes.c_long, ctypes.c_bool]
    return loaded


def _failing(trial: Trial, n: int, spares_torch: bool) -> BaseException | None:
    """Make the call while its n-th allocation fails. Return the exception that the call raised, or
    None.
    """
    raised = None
    _new().fail_new_at(n, spares_torch)
    try:
        trial.call()
    except BaseException as error:
        raised = error
    finally:
        _new().fail_new_at(-1, False)
    return raised


def _say_broken(trial: Trial) -> list[bool]:
    def refuses(call) -> bool:
        try:
            call()
        except RuntimeError as error:
            return BROKEN in str(error)
        except Exception:
            return False
        return False

    if not trial.refusals or not refuses(trial.refusals[0]):
        return []
    return [refuses(call) for call in trial.refusals]


def _states(case: Case) -> list[list[object]]:
    """Return the expected values: the state of one object without the call, and the result and the
    state of another object after the call.
    """
    untouched, called = case.make(), case.make()
    answered = plain(called.call())
    return [
        [answer(each) for each in untouched.state()],
        [answered, *(answer(each) for each in called.state())],
    ]


def try_allocation(case: Case, n: int, states: list[list[object]]) -> tuple[str, str] | None:
    """Make the n-th allocation of the call fail.

    Return the result and its details, or None if the call makes fewer allocations.
    """
    for repeats, expected in zip((False, True), states):
        trial = case.make()
        raised = _failing(trial, n, case.spares_torch)
        if raised is None:
            return None
        if not isinstance(raised, MemoryError):
            return WRONG_ERROR, repr(raised)[:300]
        del raised
        said = _say_broken(trial)
        if all(said) and said:
            trial.free()
            continue
        if any(said):
            return BROKEN_SILENT, f"calls that report it: {said}"
        found = ([answer(trial.call)] if repeats else []) + [answer(s) for s in trial.state()]
        for i, (a, b) in enumerate(zip(expected, found, strict=True)):
            if a != b:
                again = "called again; " if repeats else ""
                return CHANGED, f"{again}answer {i}: expected {a!r:.300}, is {b!r:.300}"
    return (BROKEN_SAID, "") if said and all(said) else (UNCHANGED, "")


def run_cases(cases: list[Case], first: int, first_n: int) -> None:
    """Run the cases, and print a line before and after each failed allocation."""
    for at, case in enumerate(cases[first:], first):
        states = _states(case)
        n = first_n if at == first else 1
        while True:
            # If the process dies, the last of these lines identifies the allocation.
            print(json.dumps([at, n]), flush=True)
            faulthandler.dump_traceback_later(MOST_SECONDS, exit=True)
            result = try_allocation(case, n, states)
            faulthandler.cancel_dump_traceback_later()
            if result is None:
                break
            print(json.dumps([at, n, *result]), flush=True)
            n += 1


def survey(family: str, cases: list[Case], timeout_s: float) -> dict[str, collections.Counter]:
    """Run all cases of a family.

    Return the number of results of each kind per case, and print examples of faults.
    """
    counts = {case.name: collections.Counter() for case in cases}
    environment = {**os.environ, "LD_PRELOAD": str(library()), "PYTHONPATH": roots.python_path()}
    first, first_n = 0, 1
    while True:
        command = [sys.executable, "-m", "tests.machinery.out_of_memory", "--child", family]
        done = subprocess.run(
            [*command, str(first), str(first_n)],
            capture_output=True,
            text=True,
            cwd=REPO,
            env=environment,
            timeout=timeout_s,
        )
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
        for at, n, *result in lines:
            if result:
                name = cases[at].name
                counts[name][result[0]] += 1
                if result[0] in IS_WRONG and counts[name][result[0]] == 1:
                    print(f"{name}, allocation {n}: {result[0]}: {result[1]}", flush=True)
        if done.returncode == 0:
            return counts
        has_hung = "Timeout (" in done.stderr
        if (done.returncode > 0 and not has_hung) or not lines:
            raise RuntimeError(f"{family}: {done.stderr[-4000:]}")
        first, n = lines[-1][:2]
        first_n = n + 1
        counts[cases[first].name][DIED] += 1
        print(f"{cases[first].name}, allocation {n}: {DIED}: {done.stderr[-300:]}", flush=True)
