"""Draws calls, makes one argument or two of each wrong, and looks at what came of it.

Calls run in a child process, in which memory is limited. A child that dies, or hangs, is a finding, and
the next one goes on behind the call that it died of. Every call is told by its number and the seed.
"""

from __future__ import annotations

import collections
import faulthandler
import functools
import inspect
import itertools
import json
import os
import random
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType

from tests.wrong_calls.messages import names_one_of

SLOW_S = 2.0
HANG_S = 60.0  # for the calls of a batch
MEMORY = 8 << 30  # more than the process has, of address space
BATCH = 40  # calls on one scene, then what was refused is compared with a twin
MOST_UNCLEAR = 0.01  # of the refused calls
SKIPPED = {"device"}  # of optional arguments


@dataclass
class Counts:
    """What came of the calls, by kind, and the calls behind the bad kinds."""

    calls: int = 0
    kinds: collections.Counter = field(default_factory=collections.Counter)
    by_name: collections.Counter = field(default_factory=collections.Counter)  # (name, kind)
    unclear: collections.Counter = field(default_factory=collections.Counter)
    findings: list[dict] = field(default_factory=list)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, event: dict) -> None:
        kind = event["kind"]
        if kind == "count":
            self.calls += event["calls"]
            for name, of_name, count in event["counts"]:
                self.kinds[of_name] += count
                self.by_name[name, of_name] += count
        elif kind == "unclear":
            key = f"{event['name']}({event['wrong']}): {event['error']}"
            self.unclear[key] += 1
            self.examples.setdefault(key, f"call {event['at']}: {event['text']}")
        else:
            self.findings.append(event)

    def of(self, *kinds: str) -> list[dict]:
        return [event for event in self.findings if event["kind"] in kinds]


def run(
    seed: int, first: int, count: int, scenes: list[str] | None = None, counts: Counts | None = None
) -> Counts:
    """Calls `first` to `first + count - 1` of a seed, in as many child processes as it takes."""
    counts = Counts() if counts is None else counts
    at, end = first, first + count
    while at < end:
        command = [sys.executable, "-m", "tests.wrong_calls", "--child"]
        command += ["--seed", str(seed), "--first", str(at), "--calls", str(end - at)]
        command += [f"--scene={name}" for name in scenes or ()]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        begun = ""
        for line in child.stdout:
            if line.startswith("{"):
                counts.add(json.loads(line))
            else:
                begun = line
        errors = child.stderr.read()
        if child.wait() == 0:
            return counts
        if not begun:
            raise RuntimeError(errors[-4000:])
        lines = [line for line in errors.splitlines() if line.strip()]
        text = f"exit {child.returncode}: {' | '.join(lines[:1] + lines[-12:])[:1500]}"
        at, scene, name, wrong = begun.rstrip("\n").split("\t")
        kind = "hang" if "Timeout (" in errors else "crash"
        at = int(at)
        call = {"at": at, "seed": seed, "scene": scene, "name": name, "wrong": wrong}
        counts.add({"kind": kind, **call, "text": text})
        counts.add({"kind": "count", "calls": 1, "counts": [(name, kind, 1)]})
        at += 1
    return counts


# --- in the child


@dataclass
class _Child:
    """Makes calls and prints what it finds, one JSON object a line; before each call, what it is."""

    seed: int
    counts: collections.Counter = field(default_factory=collections.Counter)

    def batch(self, numbers: list[int], name: str, make: Callable, wanted: object) -> None:
        """Calls on one scene, which is made anew whenever one succeeds."""
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        scene, refused, is_changed = make(), [], False
        for at in numbers:
            call = _Call(self.seed, at, name, scene)
            print(at, name, call.name, call.shown, sep="\t", flush=True)
            kind = self._made(call, make)
            self.counts[call.name, kind] += 1
            if kind != "accepted":
                refused.append(call)
            elif not scene.is_constant:
                scene, is_changed = make(), True
        if refused and not scene.is_constant:
            self._compare(
                name, make, _after(make, refused) if is_changed else scene, wanted, refused
            )
        counts = [(*key, count) for key, count in self.counts.items()]
        _tell({"kind": "count", "calls": len(numbers), "counts": counts})
        self.counts.clear()
        faulthandler.cancel_dump_traceback_later()

    def _made(self, call: _Call, make: Callable) -> str:
        """Makes a call; the kind of what came of it."""
        from tests.wrong_calls.values import OwnError

        call.make()
        if call.took > SLOW_S:  # also where nothing else delays it?
            again = _Call(call.seed, call.at, call.scene, make())
            again.make()
            if again.took > SLOW_S:
                _tell({**call.event("slow"), "text": f"{again.took:.1f} s, {call.text}"})
        error = call.error
        if error is None:
            return "accepted"
        if isinstance(error, OwnError):
            return "own error"
        is_right = isinstance(error, TypeError | ValueError | RuntimeError | IndexError)
        if is_right and names_one_of(call.text, call.wrong):
            return "clear"
        _tell({**call.event("unclear"), "error": f"{type(error).__name__} {call.place}"})
        return "unclear"

    def _compare(
        self, name: str, make: Callable, scene: object, wanted: object, refused: list[_Call]
    ) -> None:
        problem = _difference(scene, wanted)
        if problem is None:
            return
        for each in refused:  # which of them was it?
            found = _difference(_after(make, [each]), wanted)
            if found is not None:
                _tell({**each.event("changed"), "text": f"{each.text} THEN {found}"[:600]})
                return
        together = ", ".join(each.name for each in refused)
        event = {**refused[0].event("changed"), "text": f"together {together}: {problem}"[:600]}
        _tell(event)


def child(seed: int, first: int, count: int, names: list[str] | None) -> None:
    """Makes the calls and prints what it finds."""
    warnings.simplefilter("ignore")
    import torch

    from tests.wrong_calls.scenes import SCENES
    from tests.wrong_calls.values import TENSORS

    torch.set_num_threads(1)
    for make in TENSORS:  # torch imports much when it first has some of them, or shows them
        value = make()
        if value.numel() < 100:
            repr(value)
    _limit_memory()
    scenes = {name: SCENES[name] for name in (names or SCENES)}
    wanted = {name: make().follow() for name, make in scenes.items()}
    maker = _Child(seed)
    numbers = iter(range(first, first + count))
    while batch := list(itertools.islice(numbers, BATCH)):
        name = random.Random(f"{seed}:{batch[0] // BATCH}").choice([*scenes])
        maker.batch(batch, name, scenes[name], wanted[name])


def _limit_memory() -> None:
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))


def _tell(event: dict) -> None:
    print(json.dumps(event), flush=True)


def _after(make: Callable, calls: list[_Call]) -> object:
    """A scene after these calls."""
    scene = make()
    for each in calls:
        _Call(each.seed, each.at, each.scene, scene).make()
    return scene


def _difference(scene: object, wanted: object) -> str | None:
    try:
        got = scene.follow()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if got == wanted:
        return None
    where = next((i for i, (a, b) in enumerate(zip(got, wanted)) if a != b), -1)
    return f"answer {where} differs"


class _Call:
    """Call `at` of a seed, on a scene; which it is depends on these alone."""

    def __init__(self, seed: int, at: int, name_of_scene: str, scene: object) -> None:
        from tests.wrong_calls.values import variant

        rng = random.Random(f"{seed}:{at}")
        self.seed, self.at, self.scene = seed, at, name_of_scene
        self.name, self._function, arguments = rng.choice([*scene.calls()])
        self.wrong = _pick(rng, self._function, arguments)
        self._passed = {**arguments}
        for each in self.wrong:
            self._passed[each] = variant(rng, arguments.get(each), scene.others())
        kinds = [f"{each}={type(self._passed[each]).__name__}" for each in self.wrong]
        self.shown = ",".join(kinds)
        self.error: BaseException | None = None

    def make(self) -> None:
        started = time.perf_counter()
        try:
            self._function(**self._passed)
        except BaseException as raised:
            # The traceback is not kept: its frames hold on to what they work with.
            self.place = _place(raised.__traceback__)
            self.error = raised.with_traceback(None)
        self.took = time.perf_counter() - started
        self.text = "accepted" if self.error is None else _text_of(self.error)

    def event(self, kind: str) -> dict:
        """For the reader; shows the wrong arguments as they are after the call."""
        shown = {each: _shown(self._passed[each]) for each in self.wrong}
        call = {"at": self.at, "seed": self.seed, "scene": self.scene, "name": self.name}
        return {
            "kind": kind,
            **call,
            "wrong": ",".join(self.wrong),
            "shown": shown,
            "text": self.text,
        }


def _place(traceback: TracebackType) -> str:
    """Where an error was raised."""
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return f"{os.path.basename(traceback.tb_frame.f_code.co_filename)}:{traceback.tb_lineno}"


def _pick(rng: random.Random, function: Callable, arguments: dict) -> list[str]:
    """One argument or two to be wrong; sometimes one that has a default."""
    names = [*arguments]
    further = [name for name in _parameters(function) if name not in arguments]
    wrong = [rng.choice(further if further and rng.random() < 0.3 else names)]
    if rng.random() < 0.15:
        wrong.append(rng.choice(names))
    return list(dict.fromkeys(wrong))


def _parameters(function: Callable) -> tuple[str, ...]:
    """The names of what a function takes by name."""
    if hasattr(function, "__signature__"):  # made for one call
        return tuple(function.__signature__.parameters)
    if inspect.ismethod(function):
        return _names_of(function.__func__)[1:]
    return _names_of(function)


@functools.lru_cache(maxsize=500)
def _names_of(function: Callable) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a native function
        return ()
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(n for n, each in parameters.items() if each.kind in kinds and n not in SKIPPED)


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
    """Lines for a reader."""
    kinds = counts.kinds
    found = ", ".join(
        f"{len(counts.of(kind))} {text}"
        for kind, text in (
            ("crash", "crashes"),
            ("hang", "hangs"),
            ("slow", f"over {SLOW_S} s"),
            ("changed", "changes after an error"),
        )
    )
    yield (
        f"{counts.calls} calls: {kinds['accepted']} accepted, {kinds['clear']} clear errors, "
        f"{kinds['own error']} of an argument's own, {kinds['unclear']} unclear "
        f"({share_unclear(counts):.2%}); {found}"
    )
    yield from map(json.dumps, counts.findings)
    names = sorted({name for name, _ in counts.by_name})
    for name in names:
        of_name = {kind: counts.by_name[name, kind] for kind in ("accepted", "clear", "unclear")}
        yield f"{name}: " + ", ".join(f"{count} {kind}" for kind, count in of_name.items())
    for key, count in counts.unclear.most_common():
        yield f"unclear {count}: {key}: {counts.examples[key][:200]}"


def share_unclear(counts: Counts) -> float:
    """Of the refused calls."""
    return counts.kinds["unclear"] / max(counts.calls - counts.kinds["accepted"], 1)
