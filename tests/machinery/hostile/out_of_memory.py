# SPDX-License-Identifier: Apache-2.0
"""Makes each allocation of each right call fail, one at a time.

The failed call must change nothing, or its object must report that it is broken. In both cases the
call then still works, or is rejected.
"""

from __future__ import annotations

import collections
import ctypes
import faulthandler
import functools
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from kvcache.native import build
from tests.machinery.compilers import cxx
from tests.machinery.hostile import children
from tests.machinery.hostile.scenes import SCENES, Scene
from tests.machinery.hostile.state import answer, difference
from tests.machinery.hostile.world import walked
from tests.machinery.shared import REPO

BROKEN = "is broken: memory ran out within"
MOST_SECONDS = 10  # time limit per trial, because a loop over a corrupted list may never end

# Possible results of a failed allocation.
UNCHANGED, BROKEN_SAID = "unchanged", "broken and reported"
CHANGED, BROKEN_SILENT = "changed", "broken and not reported"
WRONG_ERROR = "another error than MemoryError"


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


def _failing(scene: Scene, call: Callable, n: int) -> BaseException | None:
    """Make the call while its n-th allocation fails. Return the exception that it raised, or None."""
    raised = None
    _new().fail_new_at(n, scene.spares_torch)
    try:
        call()
    except BaseException as error:
        raised = error
    finally:
        _new().fail_new_at(-1, False)
    return raised


def _say_broken(scene: Scene) -> list[bool]:
    def refuses(call: Callable) -> bool:
        try:
            call()
        except RuntimeError as error:
            return BROKEN in str(error)
        except Exception:
            return False
        return False

    refusals = scene.refusals()
    if not refusals or not refuses(refusals[0]):
        return []
    return [refuses(call) for call in refusals]


def _try_allocation(make: Callable, at: int, n: int, states: list) -> tuple[str, str] | None:
    """Make the n-th allocation of call `at` of a new scene fail.

    Return the result and its details, or None if the call makes fewer allocations.
    """
    for repeats, expected in zip((False, True), states):
        scene = make()
        call = scene.right_call(at)
        raised = _failing(scene, call, n)
        if raised is None:
            return None
        if not isinstance(raised, MemoryError):
            return WRONG_ERROR, repr(raised)[:300]
        del raised
        said = _say_broken(scene)
        if all(said) and said:
            scene.free_all()
            continue
        if any(said):
            return BROKEN_SILENT, f"calls that report it: {said}"
        found = difference(expected, ([answer(call)] if repeats else []) + scene.follow())
        if found is not None:
            return CHANGED, f"{'called again; ' if repeats else ''}answer {found}"[:700]
    return (BROKEN_SAID, "") if said and all(said) else (UNCHANGED, "")


def items(name: str) -> list[tuple[str, Callable[[], Scene], int]]:
    """Return the name, the scene and the number of each call of a scene, or of each public call
    whose name starts with `name`.
    """
    if name in SCENES:
        make = SCENES[name]
        return [(call, make, at) for at, (call, *_) in enumerate(make().calls())]
    calls = [each for each in walked().items() if each[0].startswith(name)]
    return [(call, make, 0) for call, make in calls]


def child(name: str, first: int, first_n: int) -> Iterator[list]:
    """Make the calls. Yield a line before and after each failed allocation."""
    for at, (_, make, number) in list(enumerate(items(name)))[first:]:
        untouched, called = make(), make()
        untouched.right_call(number)
        # The first state is that without the call, and the second that after the call.
        call = called.right_call(number)
        states = [untouched.follow(), [answer(call), *called.follow()]]
        n = first_n if at == first else 1
        while True:
            yield [at, n]
            faulthandler.dump_traceback_later(MOST_SECONDS, exit=True)
            result = _try_allocation(make, number, n, states)
            faulthandler.cancel_dump_traceback_later()
            if result is None:
                break
            yield [at, n, *result]
            n += 1


def survey(name: str) -> dict[str, collections.Counter]:
    """Run the calls of `items`.

    Return the number of results of each kind per call, and print examples of faults.
    """
    calls = [call for call, *_ in items(name)]
    counts = {call: collections.Counter() for call in calls}
    for at, n, *result in children.run("memory", name, {"LD_PRELOAD": str(library())}):
        if result:
            counts[calls[at]][result[0]] += 1
            if result[0] not in (UNCHANGED, BROKEN_SAID) and counts[calls[at]][result[0]] == 1:
                print(f"{name}: {calls[at]}, allocation {n}: {result[0]}: {result[1]}", flush=True)
    return counts
