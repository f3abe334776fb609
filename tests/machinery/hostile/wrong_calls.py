# SPDX-License-Identifier: Apache-2.0
"""Draws calls, makes one or two arguments of each call invalid, and checks the results.

Calls run in a child process with limited memory. A crash or hang of a child is a finding, and the
next child continues after the call that caused it. A call is identified by the seed and its number.
"""

from __future__ import annotations

import collections
import faulthandler
import gc
import json
import math
import mmap
import os
import random
import resource
import shutil
import signal
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch

from tests.machinery.forked import context
from tests.machinery.hostile.messages import is_clear
from tests.machinery.hostile.scenes import SCENES
from tests.machinery.hostile.state import difference
from tests.machinery.hostile.values import TENSORS, OwnError, variant
from tests.machinery.hostile.world import finish, walked

SLOW_S = 2.0
HANG_S, BUSY_S = 60.0, 5.0  # limits per call in seconds of wall time and of CPU time
MEMORY = 8 << 30  # bytes of address space that a child may use in addition to what it has inherited
BATCH = 40  # number of calls on a scene before its state is compared with that of an untouched twin
MOST_UNCLEAR = 0.01  # maximum fraction of rejected calls with unclear messages
BAD = {
    "crash": "crashes",
    "hang": "hangs",
    "slow": f"over {SLOW_S} s",
    "changed": "changes after an error",
    "leak": "leaks of files or threads",
    "closed": "closed standard streams",
}
_JOURNAL = 900  # file descriptor for a child's findings, a number that no argument uses
_ERRORS = ".stderr"  # name of the file for stderr in a child's folder
_OWN_FAULT = 99  # exit code of a worker after an error in the fuzzer itself
_ROUNDS = 3  # number of times that a batch that may leak is repeated
# Maximum number of crashes that a scene may cause in a child process. Once it is reached, the
# remaining batches of the scene are skipped.
_MOST_DEATHS = 2


@dataclass
class Counts:
    """The number of results of each kind, and the calls with bad results."""

    calls: int = 0
    kinds: collections.Counter = field(default_factory=collections.Counter)
    by_name: collections.Counter = field(default_factory=collections.Counter)  # (name, kind)
    unclear: collections.Counter = field(default_factory=collections.Counter)
    findings: list[dict] = field(default_factory=list)
    # The number of findings, including repeated ones.
    seen: collections.Counter = field(default_factory=collections.Counter)
    seconds: collections.Counter = field(default_factory=collections.Counter)  # seconds per scene
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, event: dict) -> None:
        kind = event["kind"]
        if kind == "count":
            self.calls += event["calls"]
            for name, of_name, count in event["counts"]:
                self.kinds[of_name] += count
                self.by_name[name, of_name] += count
        elif kind == "seconds":
            self.seconds.update(dict(event["of"]))
        elif kind == "unclear":
            key = f"{event['name']}({event['wrong']}): {event['error']}"
            self.unclear[key] += 1
            self.examples.setdefault(key, f"call {event['at']}: {event['text']}")
        else:
            same = kind, event["name"], event["wrong"].partition("=")[0]
            self.seen[same] += 1
            if self.seen[same] == 1:
                self.findings.append(event)

    def of(self, *kinds: str) -> list[dict]:
        return [event for event in self.findings if event["kind"] in kinds]


def run(
    seed: int, first: int, count: int, scenes: list[str] | None = None, counts: Counts | None = None
) -> Counts:
    """Run calls `first` to `first + count - 1` of a seed in a separate process."""
    counts = Counts() if counts is None else counts
    folder = tempfile.mkdtemp()  # calls may write files with invalid names to this folder
    errors = Path(folder) / _ERRORS
    events, theirs = context.Pipe(duplex=False)
    arguments = theirs, folder, dict(os.environ), seed, first, count, scenes
    process = context.Process(target=_begin, args=arguments)
    try:
        process.start()
        theirs.close()
        with events, os.fdopen(os.dup(events.fileno())) as lines:
            for line in lines:
                counts.add(json.loads(line))
        process.join()
        if process.exitcode != 0:
            raise RuntimeError(errors.read_text(errors="replace")[-4000:])
        return counts
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# in the child


def _begin(events: Connection, folder: str, environment: dict[str, str], *arguments: Any) -> None:
    """Start a forked child. Its findings go to the pipe, and its stderr to a file in the folder."""
    os.environ.update(environment)
    os.chdir(folder)
    with open(_ERRORS, "a") as file:
        os.dup2(file.fileno(), 2)
    os.dup2(events.fileno(), 1)
    events.close()
    child(*arguments)


class _Note:
    """The last call that a worker began. It is stored in shared memory, so that the parent can read
    it if the worker dies.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 4096)

    def write(self, *values: object) -> None:
        text = "\t".join(map(str, values)).encode()[:4000]
        self._memory[: len(text) + 1] = text + b"\0"

    def read(self) -> list[str]:
        return self._memory[:].partition(b"\0")[0].decode(errors="replace").split("\t")


class _Child:
    """Makes calls and writes findings, one JSON object per line."""

    def __init__(self, seed: int, note: _Note) -> None:
        self.seed, self.note = seed, note
        self.counts: collections.Counter = collections.Counter()
        self.seconds: collections.Counter = collections.Counter()
        self._journal = os.fdopen(os.dup(_JOURNAL), "w", buffering=1)
        os.dup2(self._journal.fileno(), _JOURNAL)
        self._restore_streams()
        self._held = _held()

    def _restore_streams(self) -> None:
        for number, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY)):
            null = os.open(os.devnull, mode)
            if null != number:
                os.dup2(null, number)
                os.close(null)

    def tell(self, event: dict) -> None:
        self._journal.write(f"{json.dumps(event)}\n")

    def batch(self, numbers: list[int], name: str, make: Callable, wanted: object) -> None:
        """Run a batch of calls on one scene.

        `wanted` is a tuple with the result of an untouched twin, or None if the scene's state is
        compared instead.
        """
        started = time.process_time()
        if wanted is None:
            self._walked(numbers, name, make)
        else:
            self._twins(numbers, name, make, *wanted)
        self.seconds[name] += time.process_time() - started
        counts = [(*key, count) for key, count in self.counts.items()]
        self.tell({"kind": "count", "calls": len(numbers), "counts": counts})
        self.counts.clear()

    def _twins(self, numbers: list[int], name: str, make: Callable, wanted: object) -> None:
        """Run a batch on a scene that is replaced after each accepted call and compared with a twin
        at the end.
        """
        scene, refused, is_changed = make(), [], False
        for at in numbers:
            call = _Call(self.seed, at, name, scene)
            if self._made(call, make) != "accepted":
                refused.append(call)
            elif not scene.is_constant:
                scene, is_changed = make(), True
        if refused and not scene.is_constant:
            scene = _after(make, refused) if is_changed else scene
            self._compare(make, scene, wanted, refused)

    def _walked(self, numbers: list[int], name: str, make: Callable) -> None:
        """Run a batch on a scene whose state can be compared after each call."""
        scene, last = make(), None
        before = scene.state()
        for at in numbers:
            last = _Call(self.seed, at, name, scene)
            is_refused = self._made(last, make) != "accepted"
            after = scene.state()
            if after == before:
                continue
            if is_refused:
                self._check_changed(last, make)
            scene.close()
            scene = make()
            before = scene.state()
        scene.close()
        self._check_leaks(last, numbers, make)

    def _check_changed(self, call: _Call, make: Callable) -> None:
        """Check whether the call also changes a new scene, because other threads may have changed
        this one.
        """
        scene = make()
        try:
            before = scene.state()
            again = _Call(call.seed, call.at, call.scene, scene)
            again.make()
            if again.error is None:
                return
            found = difference(before, scene.state())
            if found is not None:
                text = f"{again.text} THEN {found}"
                self.tell({**again.event("changed"), "text": text[:600]})
        finally:
            scene.close()

    def _check_leaks(self, call: _Call, numbers: list[int], make: Callable) -> None:
        """Check whether repeating the calls leaves more and more files or threads behind.

        Files and threads that are opened only once are not leaks.
        """
        first = self._held
        for _ in range(_ROUNDS):
            if not self._has_grown():
                return
            for at in numbers:
                scene = make()
                _Call(self.seed, at, call.scene, scene).make()
                scene.close()
        if self._has_grown():
            text = f"{first} THEN {self._held} (files, threads)"
            text = f"{text}, in calls {numbers[0]} to {numbers[-1]}"
            self.tell({**call.event("leak"), "text": text})

    def _has_grown(self) -> bool:
        """Return whether there are more open files or threads than before.

        Wait up to ten seconds for objects that are closed with a delay.
        """
        for _ in range(500):
            now = _held()
            if all(is_now <= before for is_now, before in zip(now, self._held)):
                return False
            gc.collect()
            time.sleep(0.02)
        self._held = now
        return True

    def _made(self, call: _Call, make: Callable) -> str:
        """Make a call. Return the kind of result."""
        self.note.write(call.at, call.scene, call.name, call.shown)
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        signal.setitimer(signal.ITIMER_VIRTUAL, BUSY_S)
        call.make()
        if call.took > SLOW_S:  # repeat the call, because another process may have delayed it
            again = _Call(call.seed, call.at, call.scene, make())
            again.make()
            if again.took > SLOW_S:
                self.tell({**call.event("slow"), "text": f"{again.took:.1f} s, {call.text}"})
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        faulthandler.cancel_dump_traceback_later()
        self._check_streams(call)
        error = call.error
        if error is None:
            kind = "accepted"
        elif isinstance(error, OwnError):
            kind = "own error"
        elif is_clear(error, call.text, call.wrong):
            kind = "clear"
        else:
            kind = "unclear"
            text = f"{type(error).__name__} {call.place}"
            self.tell({**call.event("unclear"), "error": text})
        self.counts[call.name, kind] += 1
        return kind

    def _check_streams(self, call: _Call) -> None:
        try:
            for number in (0, 1, 2):
                os.fstat(number)
        except OSError:
            self.tell(call.event("closed"))
            self._restore_streams()

    def _compare(self, make: Callable, scene: object, wanted: object, refused: list[_Call]) -> None:
        problem = difference(wanted, scene.follow())
        if problem is None:
            return
        for each in refused:  # find out which call caused the change
            found = difference(wanted, _after(make, [each]).follow())
            if found is not None:
                self.tell({**each.event("changed"), "text": f"{each.text} THEN {found}"[:600]})
                return
        together = ", ".join(each.name for each in refused)
        event = {**refused[0].event("changed"), "text": f"together {together}: {problem}"[:600]}
        self.tell(event)


def _held() -> tuple[int, int]:
    """Return the number of open files and of threads."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def child(seed: int, first: int, count: int, names: list[str] | None) -> None:
    """Make the calls and write the findings."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # `torch` imports many modules the first time such a tensor is created or printed.
    for make in TENSORS:
        value = make()
        if value.numel() < 100:
            repr(value)
    scenes = {**SCENES, **walked()}
    if names:
        scenes = {name: make for name, make in scenes.items() if name.startswith(tuple(names))}
    wanted = {name: (make().follow(),) for name, make in scenes.items() if name in SCENES}
    gc.collect()
    gc.freeze()
    _limit_memory()
    os.dup2(1, _JOURNAL)
    note, at, end = _Note(), first, first + count
    deaths: collections.Counter = collections.Counter()  # number of deaths per scene
    while at < end:
        note.write(at, "", "", "")
        worker = os.fork()
        if worker == 0:
            left_out = {name for name, times in deaths.items() if times >= _MOST_DEATHS}
            _work(_Child(seed, note), at, end, scenes, wanted, left_out)
        _, status = os.waitpid(worker, 0)
        if status == 0:
            return
        at, name = _report_death(note, seed, os.waitstatus_to_exitcode(status))
        at += 1
        deaths[name] += 1


def _work(
    maker: _Child, first: int, end: int, scenes: dict, wanted: dict, left_out: set[str]
) -> NoReturn:
    """Make the calls in a worker, except for those of some scenes, and exit."""
    faulthandler.enable()
    faulthandler.register(signal.SIGVTALRM, chain=True)
    try:
        at = first
        while at < end:
            batch = list(range(at, min(end, (at // BATCH + 1) * BATCH)))
            name = _scene_of(random.Random(f"{maker.seed}:{at // BATCH}"), scenes, [*wanted])
            if name not in left_out:
                maker.batch(batch, name, scenes[name], wanted.get(name))
            at = batch[-1] + 1
        maker.tell({"kind": "seconds", "of": maker.seconds.most_common(30)})
    except BaseException:
        traceback.print_exc()
        os._exit(_OWN_FAULT)
    os._exit(0)


def _report_death(note: _Note, seed: int, code: int) -> tuple[int, str]:
    """Report a worker that crashed or hung. Return the number and the scene of its last call."""
    at, scene, name, wrong = note.read()
    path = Path(_ERRORS)
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    os.truncate(path, 0)
    if not scene or code == _OWN_FAULT:
        raise RuntimeError("\n".join(lines[-40:]))
    is_hang = code == -signal.SIGVTALRM or any("Timeout (" in line for line in lines)
    kind = "hang" if is_hang else "crash"
    text = f"exit {code}: {' | '.join(lines[-30:])}"[:1500]
    call = {"at": int(at), "seed": seed, "scene": scene, "name": name, "wrong": wrong}
    events = [{"kind": kind, **call, "text": text}]
    events.append({"kind": "count", "calls": 1, "counts": [(name, kind, 1)]})
    for event in events:
        os.write(_JOURNAL, f"{json.dumps(event)}\n".encode())
    return int(at), scene


def _scene_of(rng: random.Random, scenes: dict[str, Callable], deep: list[str]) -> str:
    """In a quarter of the cases, choose a handwritten scene, and otherwise one found by the walk."""
    found = [name for name in scenes if name not in deep]
    return rng.choice(deep if deep and (not found or rng.random() < 0.25) else found)


def _limit_memory() -> None:
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))


def _after(make: Callable, calls: list[_Call]) -> object:
    """Return a new scene on which these calls have been made."""
    scene = make()
    for each in calls:
        _Call(each.seed, each.at, each.scene, scene).make()
    return scene


class _Call:
    """Call number `at` of a seed, made on a scene. The seed, the number and the scene determine the
    arguments.
    """

    def __init__(self, seed: int, at: int, name_of_scene: str, scene: object) -> None:
        rng = random.Random(f"{seed}:{at}")
        self.seed, self.at, self.scene = seed, at, name_of_scene
        self.name, self._function, arguments, further = scene.draw(rng)
        self.wrong = _pick(rng, [*arguments], further)
        self._passed = {**arguments}
        others = scene.others()
        for each in self.wrong:
            right = arguments[each] if each in arguments else scene.right_value(each, rng)
            self._passed[each] = _soon(each, variant(rng, right, others))
        kinds = [f"{each}={type(self._passed[each]).__name__}" for each in self.wrong]
        self.shown = ",".join(kinds)
        self.error: BaseException | None = None

    def make(self) -> None:
        started = time.process_time()  # CPU time; waiting time is limited by `_soon`
        try:
            finish(self._function(**self._passed))
        except BaseException as raised:
            # Drop the traceback, because its frames keep objects alive.
            self.place = _place(raised.__traceback__)
            self.error = raised.with_traceback(None)
        self.took = time.process_time() - started
        self.text = "accepted" if self.error is None else _text_of(self.error)

    def event(self, kind: str) -> dict:
        """Return a readable description that shows the invalid arguments as they are after the call."""
        shown = {each: _shown(self._passed[each]) for each in self.wrong}
        call = {"at": self.at, "seed": self.seed, "scene": self.scene, "name": self.name}
        return {
            "kind": kind,
            **call,
            "wrong": ",".join(self.wrong),
            "shown": shown,
            "text": self.text,
        }


def _soon(name: str, value: object) -> object:
    """Replace a long valid timeout with a short one, so that no call waits for days."""
    if "timeout" in name and isinstance(value, Real) and 1 < value < math.inf:
        return 0.01 if isinstance(value, int | float) else type(value)(0.01)
    return value


def _place(at: TracebackType) -> str:
    """Return the location at which an error was raised: the innermost frame in the package or, if
    there is none, the innermost frame.
    """
    found = None
    while at is not None:
        frame = at.tb_frame
        here = f"{os.path.basename(frame.f_code.co_filename)}:{at.tb_lineno}"
        if "/kvcache" in frame.f_code.co_filename or found is None:
            found = here
        at = at.tb_next
    return found


def _pick(rng: random.Random, names: list[str], further: list[str]) -> list[str]:
    """Choose one or two arguments to make invalid. Some of them may be optional."""
    is_optional = further and (not names or rng.random() < 0.3)
    wrong = [rng.choice(further if is_optional else names)]
    if rng.random() < 0.15 and names:
        wrong.append(rng.choice(names))
    return list(dict.fromkeys(wrong))


def _shown(value: object) -> str:
    try:
        shape = getattr(value, "shape", None)
        text = repr(value) if shape is None else f"{type(value).__name__}{[*shape]} {value.dtype}"
    except Exception as error:
        text = f"{type(value).__name__} ({type(error).__name__})"
    return text.encode("ascii", "backslashreplace").decode()[:80]


def _text_of(error: BaseException) -> str:
    try:
        return str(error).encode("ascii", "backslashreplace").decode()[:400]
    except Exception as other:
        return f"(str raises {type(other).__name__})"


def summary(counts: Counts) -> Iterator[str]:
    """Return the lines of a readable summary."""
    kinds = counts.kinds
    found = ", ".join(f"{len(counts.of(kind))} {text}" for kind, text in BAD.items())
    yield (
        f"{counts.calls} calls: {kinds['accepted']} accepted, {kinds['clear']} clear errors, "
        f"{kinds['own error']} raised by an argument, {kinds['unclear']} unclear "
        f"({share_unclear(counts):.2%}); {found}"
    )
    yield from map(json.dumps, counts.findings)
    slowest = ", ".join(f"{name} {took:.1f}" for name, took in counts.seconds.most_common(12))
    yield f"seconds of the slowest scenes: {slowest}"
    names = sorted({name for name, _ in counts.by_name})
    for name in names:
        of_name = {kind: counts.by_name[name, kind] for kind in ("accepted", "clear", "unclear")}
        yield f"{name}: " + ", ".join(f"{count} {kind}" for kind, count in of_name.items())
    for key, count in counts.unclear.most_common():
        yield f"unclear {count}: {key}: {counts.examples[key][:200]}"


def is_unclear(counts: Counts) -> bool:
    """Return whether too many rejected calls have unclear messages."""
    return share_unclear(counts) > MOST_UNCLEAR


def share_unclear(counts: Counts) -> float:
    """Return the fraction of rejected calls with unclear messages."""
    return counts.kinds["unclear"] / max(counts.calls - counts.kinds["accepted"], 1)
