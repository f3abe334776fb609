# SPDX-License-Identifier: Apache-2.0
"""Sends requests between a vLLM engine and an SGLang engine while faults kill or stop either.

    python -m tests.machinery.exchange_faults FOLDER [--requests N] [--kills N] [--stops N] [--tp N]

FOLDER contains a model. Runs in SGLang's environment (`python -m tests.machinery.sglang_environment
-m tests.machinery.exchange_faults ...`) and prints the counts as JSON. The direction of the
exchange alternates.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import threading
import time

from tests.machinery.sglang_process import SGLangEngine
from tests.machinery.vllm_engine import Engine
from tests.machinery.vllm_environment import FOLDERS, NEWEST

TIMEOUT_S, LEASE_S, MARGIN_S = 5.0, 15.0, 10.0
VLLM = FOLDERS / NEWEST / "bin" / "python"


class Run:
    """A seeded run. Its timing is not deterministic."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.rng = options, random.Random(options.seed)
        self.extra = {"timeout_s": TIMEOUT_S, "lease_s": LEASE_S}
        self.engines = {name: self.start(name) for name in ("vllm", "sglang")}
        for engine in self.engines.values():
            engine.answer()
        self.wanted: dict[tuple, list] = {}
        names = ("requests", "loaded", "computed", "lost", "wrong", "hanging", "leaked")
        self.found = dict.fromkeys(names, 0) | {"faults": {}, "worst_s": 0.0}

    def start(self, name: str) -> Engine | SGLangEngine:
        if name == "sglang":
            return SGLangEngine(self.options.folder, extra=self.extra)
        return Engine(
            *(self.options.folder, "kv_both"),
            extra=self.extra,
            python=VLLM,
            block_size=self.options.block_size,
            tensor_parallel_size=self.options.tp,
        )

    def prompts(self) -> list[list[int]]:
        count = self.rng.randrange(2, 6)
        return [
            [self.rng.randrange(3, 512) for _ in range(self.rng.randrange(70, 300))]
            for _ in range(count)
        ]

    def decode(self, name: str, prompts: list, offers: list) -> tuple[list, int]:
        if name == "vllm":
            offers = [each and {"do_remote_prefill": True, "kvcache": each} for each in offers]
        return self.engines[name].decode(prompts, offers)

    def round(self, number: int, fault: str | None) -> None:
        """Run a round, in which prompts are prefilled in one engine and decoded in the other."""
        names = ["vllm", "sglang"] if number % 2 else ["sglang", "vllm"]
        sender, receiver = names
        prompts = self.prompts()
        wanted, _ = self.decode(receiver, prompts, [None] * len(prompts))
        self.reset(receiver)
        offers = self.engines[sender].prefill(prompts)
        if sender == "vllm":
            offers = [each["kvcache"] for each in offers]
        self.found["requests"] += len(prompts)
        timers = []
        victim = None
        if fault is not None:
            victim = self.rng.choice(["sender", "receiver"])
            engine = self.engines[sender if victim == "sender" else receiver]
            key = f"{fault} {'vllm' if engine is self.engines['vllm'] else 'sglang'}, {victim}"
            self.found["faults"][key] = self.found["faults"].get(key, 0) + 1
            delay = self.rng.choice([0.0, 0.02, 0.1, 0.3])
            if fault == "kill":
                timers.append(threading.Timer(delay, engine.signal, [signal.SIGKILL]))
            else:
                timers.append(threading.Timer(delay, engine.signal, [signal.SIGSTOP]))
                timers.append(threading.Timer(delay + 7.0, engine.signal, [signal.SIGCONT]))
        began = time.monotonic()
        for timer in timers:
            timer.start()
        try:
            tokens, computed = self.decode(receiver, prompts, offers)
        except (AssertionError, BrokenPipeError):
            if victim != "receiver":
                raise
            tokens, computed = None, 0
        took = time.monotonic() - began
        for timer in timers:
            timer.join()
        if fault == "kill":
            engine.process.wait(timeout=30)
        if tokens is None:
            self.found["lost"] += len(prompts)
        else:
            self.found["wrong"] += sum(a != b for a, b in zip(tokens, wanted))
            all_tokens = sum(map(len, prompts))
            self.found["computed" if computed >= all_tokens else "loaded"] += len(prompts)
            if victim != "receiver":  # the receiving engine itself was not stopped
                self.found["worst_s"] = max(self.found["worst_s"], round(took, 2))
                self.found["hanging"] += len(prompts) * (took > TIMEOUT_S + MARGIN_S)
        for name in names:
            if self.engines[name].process.poll() is not None:
                self.engines[name].close()
                self.engines[name] = self.start(name)
                self.engines[name].answer()
        for name in names:
            self.reset(name)

    def reset(self, name: str) -> None:
        """Wait until no block is held, and then clear the cache."""
        try:
            self.engines[name].wait_until_empty(timeout_s=60)
        except AssertionError:
            self.found["leaked"] += 1

    def run(self) -> dict:
        faults = ["kill"] * self.options.kills + ["stop"] * self.options.stops
        self.rng.shuffle(faults)
        number = 0
        while self.found["requests"] < self.options.requests or faults:
            number += 1
            is_quiet = self.found["requests"] < self.options.requests and self.rng.random() < 0.4
            self.round(number, None if is_quiet or not faults else faults.pop())
            print(json.dumps(self.found), file=sys.stderr, flush=True)
        return self.found

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    for name, value in (("requests", 400), ("kills", 20), ("stops", 20), ("tp", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    run = Run(parser.parse_args())
    try:
        print(json.dumps(run.run()))
    finally:
        run.close()


if __name__ == "__main__":
    main()
