"""Draws calls, makes one argument or two of each wrong, and looks at what came of it.

Calls run in a child process, in which memory is limited. A child that dies, or hangs, is a finding, and
the next one goes on behind the call that it died of. Every call is told by its number and the seed.
"""

from __future__ import annotations

import collections
import faulthandler
import inspect
import itertools
import json
import os
import random
import re
import resource
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

SLOW_S = 2.0
HANG_S = 30.0
MEMORY = 8 << 30  # more than the process has, of address space
BATCH = 40  # refused calls between two comparisons with a twin
SKIPPED = {"device"}  # of optional arguments


@dataclass
class Counts:
    """What came of the calls, by kind, and the calls behind the bad kinds."""

    calls: int = 0
    kinds: collections.Counter = field(default_factory=collections.Counter)
    unclear: collections.Counter = field(default_factory=collections.Counter)
    findings: list[dict] = field(default_factory=list)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, event: dict) -> None:
        kind = event["kind"]
        if kind == "count":
            self.calls += event["calls"]
            self.kinds.update(event["kinds"])
        elif kind == "unclear":
            key = f"{event['name']}({event['wrong']}): {event['error']}"
            self.unclear[key] += 1
            self.examples.setdefault(key, event["text"])
        else:
            self.findings.append(event)

    def of(self, *kinds: str) -> list[dict]:
        return [event for event in self.findings if event["kind"] in kinds]


def run(seed: int, first: int, count: int, scenes: list[str] | None = None) -> Counts:
    """Calls `first` to `first + count - 1` of a seed, in as many child processes as it takes."""
    counts, at, end = Counts(), first, first + count
    while at < end:
        command = [sys.executable, "-m", "tests.wrong_calls", "--child"]
        command += ["--seed", str(seed), "--first", str(at), "--calls", str(end - at)]
        command += [f"--scene={name}" for name in scenes or ()]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        begun: dict = {}
        for line in child.stdout:
            event = json.loads(line)
            if event["kind"] == "begin":
                begun = event
            else:
                counts.add(event)
        errors = child.stderr.read()
        if child.wait() == 0:
            return counts
        lines = [line for line in errors.splitlines() if line.strip()]
        kind = "hang" if "Timeout (" in errors else "crash"
        text = " | ".join(lines[:1] + lines[-12:])
        counts.add({**begun, "kind": kind, "text": f"exit {child.returncode}: {text[:1500]}"})
        if "at" not in begun:
            raise RuntimeError(errors[-4000:])
        at = begun["at"] + 1
    return counts


# --- in the child


def child(seed: int, first: int, count: int, names: list[str] | None) -> None:
    """Makes the calls and prints what it finds, one JSON object a line."""
    warnings.simplefilter("ignore")
    import torch

    from tests.wrong_calls.scenes import SCENES

    torch.set_num_threads(1)
    _limit_memory()
    scenes = {name: SCENES[name] for name in (names or SCENES)}
    wanted = {name: make().follow() for name, make in scenes.items()}
    kinds: collections.Counter = collections.Counter()
    numbers = iter(range(first, first + count))
    while batch := list(itertools.islice(numbers, BATCH)):
        name = random.Random(f"{seed}:{batch[0] // BATCH}").choice([*scenes])
        _batch(seed, batch, name, scenes[name], wanted[name], kinds)
        _tell({"kind": "count", "calls": len(batch), "kinds": dict(kinds)})
        kinds.clear()


def _limit_memory() -> None:
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))


def _tell(event: dict) -> None:
    print(json.dumps(event), flush=True)


def _batch(
    seed: int,
    batch: list[int],
    name: str,
    make: Callable,
    wanted: object,
    kinds: collections.Counter,
) -> None:
    """Calls on one scene, which is made anew whenever one succeeds."""
    scene, refused = make(), []
    for at in batch:
        outcome = _call(seed, at, name, scene, kinds)
        if outcome is not None:
            refused.append(outcome)
            continue
        # What succeeded has changed the scene, so those before it are made on another one.
        if refused:
            _compare(name, make, _after(make, name, refused), wanted, refused)
        scene, refused = make(), []
    _compare(name, make, scene, wanted, refused)


def _after(make: Callable, name: str, refused: list[dict]) -> object:
    scene = make()
    for each in refused:
        _call(each["seed"], each["at"], name, scene, collections.Counter(), quiet=True)
    return scene


def _compare(name: str, make: Callable, scene: object, wanted: object, refused: list[dict]) -> None:
    problem = _difference(scene, wanted) if refused else None
    if problem is None:
        return
    for each in refused:  # which of them was it?
        found = _difference(_after(make, name, [each]), wanted)
        if found is not None:
            _tell({**each, "kind": "changed", "text": f"{each['text']} THEN {found}"[:600]})
            return
    together = ", ".join(each["name"] for each in refused)
    _tell({**refused[0], "kind": "changed", "text": f"together {together}: {problem}"[:600]})


def _difference(scene: object, wanted: object) -> str | None:
    try:
        got = scene.follow()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if got == wanted:
        return None
    where = next((i for i, (a, b) in enumerate(zip(got, wanted)) if a != b), -1)
    return f"answer {where} differs"


def _call(
    seed: int, at: int, name: str, scene: object, kinds: collections.Counter, quiet: bool = False
) -> dict | None:
    """Makes call `at`; None where it succeeds, which may have changed the scene."""
    from tests.wrong_calls.values import OwnError, variant

    rng = random.Random(f"{seed}:{at}")
    label, function, arguments = rng.choice([*scene.calls()])
    wrong = _pick(rng, function, arguments)
    passed = {**arguments}
    for each in wrong:
        passed[each] = variant(rng, arguments.get(each), scene.others())
    event = {"at": at, "seed": seed, "scene": name, "name": label, "wrong": ",".join(wrong)}
    shown = {each: _shown(passed[each]) for each in wrong}
    if not quiet:
        _tell({"kind": "begin", **event, "shown": shown})
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    started = time.perf_counter()
    try:
        function(**passed)
        error = None
    except BaseException as raised:
        error = raised
    finally:
        faulthandler.cancel_dump_traceback_later()
    took = time.perf_counter() - started
    event["shown"] = shown
    if took > SLOW_S and not quiet:
        _tell({**event, "kind": "slow", "text": f"{took:.1f} s, {type(error).__name__}"})
    if error is None:
        kinds["accepted"] += 1
        return None
    event["text"] = text = _text_of(error)
    if isinstance(error, OwnError):
        kinds["own error"] += 1
    elif isinstance(error, TypeError | ValueError | RuntimeError | IndexError) and _names(
        text, wrong, shown
    ):
        kinds["clear"] += 1
    else:
        kinds["unclear"] += 1
        if not quiet:
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{os.path.basename(place.filename)}:{place.lineno}"
            _tell({**event, "kind": "unclear", "error": f"{type(error).__name__} {where}"})
    return event


def _pick(rng: random.Random, function: Callable, arguments: dict) -> list[str]:
    """One argument or two to be wrong; sometimes one that has a default."""
    names = [*arguments]
    try:
        further = [
            name
            for name, each in inspect.signature(function).parameters.items()
            if name not in arguments
            and each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)
            and name not in SKIPPED
        ]
    except (TypeError, ValueError):  # a native function
        further = []
    wrong = [rng.choice(further if further and rng.random() < 0.3 else names)]
    if rng.random() < 0.15:
        wrong.append(rng.choice(names))
    return list(dict.fromkeys(wrong))


# Words by which errors name what an argument consists of.
_WORDS = {
    "request": ("request", "token_ids", "block_hashes", "row"),
    "new": ("request", "new"),
    "seq": ("seq", "get_len", "get_token_ids"),
    "seqs": ("seq",),
    "seq_group": ("seq", "group", "encoder"),
    "seq_groups": ("seq", "group"),
    "parent_seq": ("seq",),
    "child_seq": ("seq",),
    "report": ("report", "step", "failed_pages", "failed_host_pages", "completed"),
    "step_id": ("step",),
    "plan": (
        "num_",
        "max_",
        "page_bytes",
        "plan",
        "append",
        "swap",
        "copy",
        "zero",
        "replace",
        "clear_rows",
        "step",
    ),
    "layers": ("layer",),
    "number": ("layer",),
    "tp_size": ("tp_",),
    "dcp_world_size": ("dcp_",),
    "pcp_world_size": ("pcp_",),
    "values": ("version", "value"),
    "num_tokens": ("num_tokens", "delay_cache_blocks"),
    "num_padded_reqs": ("requests",),
    "sliding_window": ("window",),
    "ids": ("ids", "page", "block"),
    "block_ids": ("block_ids", "append"),
    "required": ("layout", "connector"),
    "pairs": ("pairs", "swap_out", "swap_in"),
    "pages": ("pages", "before_write"),
    "k_scale": ("scale", "fp8"),
    "v_scale": ("scale", "fp8"),
    "caches": ("cache", "layer"),
    "cache": ("cache", "layer"),
    "name": ("backend",),
    "parent": ("parent", "request"),
    "child": ("child", "request"),
    "append_rows": ("append",),
    "append_ids": ("append",),
    "append_splits": ("append",),
    "groups": ("group",),
    "tables": ("table",),
    "storage": ("storage", "block_size"),
    "host": ("page", "host", "fragment"),
    "device": ("page", "device", "fragment"),
}


def _names(text: str, wrong: list[str], shown: dict) -> bool:
    """Whether a message names one of these arguments."""
    plain = text.lower()
    if "incompatible function arguments" in plain:
        return False
    for name in wrong:
        words = {name, name.removesuffix("s"), *_WORDS.get(name, ())}
        if any(re.search(rf"(?<![a-z]){re.escape(word)}", plain) for word in words):
            return True
    return False


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
    refused = counts.calls - kinds["accepted"]
    share = kinds["unclear"] / max(refused, 1)
    yield (
        f"{counts.calls} calls: {kinds['accepted']} accepted, {kinds['clear']} clear errors, "
        f"{kinds['own error']} of an argument's own, {kinds['unclear']} unclear ({share:.2%}); "
        + ", ".join(
            f"{len(counts.of(kind))} {text}"
            for kind, text in (
                ("crash", "crashes"),
                ("hang", "hangs"),
                ("slow", f"over {SLOW_S} s"),
                ("changed", "changes after an error"),
            )
        )
    )
    for event in counts.findings:
        yield json.dumps(event)
    for key, count in counts.unclear.most_common():
        yield f"unclear {count}: {key}: {counts.examples[key][:200]}"
