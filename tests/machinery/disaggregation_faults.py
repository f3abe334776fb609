# SPDX-License-Identifier: Apache-2.0
"""Sends requests from a prefill process to a decode process while faults kill or stop either
process.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from contextlib import ExitStack

from tests.machinery.disaggregation_engine import EngineProcess

TIMEOUT_S, LEASE_S, MARGIN_S = 3.0, 6.0, 1.0
KINDS = ["full", "window", "state"]


class Faults:
    """A seeded run. The timing of the processes is not deterministic.

    Each round loads one to four requests in parallel. In a round with a fault, a process is killed
    or stopped before or during the loads. A killed process restarts under the same name. A stopped
    process resumes after a delay.
    """

    def __init__(
        self,
        seed: int,
        *,
        num_requests: int,
        num_kills: int,
        num_stops: int,
        transport: str = "tcp",
        progress: bool = False,
        margin_s: float = MARGIN_S,
    ) -> None:
        self._rng = random.Random(seed)
        self._num_requests, self._transport, self._progress = num_requests, transport, progress
        self._faults = ["kill"] * num_kills + ["stop"] * num_stops
        self._rng.shuffle(self._faults)
        self._number, self._margin_s = 0, margin_s
        self.found = {
            "seed": seed,
            "requests": 0,
            "kills": {"prefill": 0, "decode": 0},
            "stops": {"prefill": 0, "decode": 0},
            **dict.fromkeys(("loaded", "computed", "lost", "wrong", "hanging", "leaked"), 0),
            "deadline_s": TIMEOUT_S,
            "worst_wait_s": 0.0,  # seconds; excludes requests whose own process was stopped
            "of_that_without_a_core_s": 0.0,
            "reasons": {},
        }

    def run(self) -> dict:
        """Run all rounds and return the counts.

        `lost` counts requests of a killed decode process.
        """
        options = {"transport": self._transport, "timeout_s": TIMEOUT_S, "lease_s": LEASE_S}
        common = {"kinds": KINDS, "options": options, "num_blocks": 300}
        with ExitStack() as stack:
            self.prefill = stack.enter_context(
                EngineProcess("prefill", tp=2, block=16, layout="HND", **common)
            )
            self.decode = stack.enter_context(EngineProcess("decode", tp=1, block=32, **common))
            rounds = 0
            while self.found["requests"] < self._num_requests:
                left = self._num_requests - self.found["requests"]
                self._round(self._next_fault(left))
                rounds += 1
                if rounds % 20 == 0:
                    self._check_leaks()
            self._check_leaks()
        return self.found

    def _next_fault(self, left: int) -> str | None:
        """Draw the fault of the next round. Return None if the round has no fault.

        Faults are spread over the remaining requests, about 2.5 requests per round.
        """
        if self._faults and self._rng.random() < len(self._faults) * 3 / max(left, 1):
            return self._faults.pop()
        return None

    def _round(self, fault: str | None) -> None:
        requests = [self._request() for _ in range(self._rng.randint(1, 4))]
        victim = self._rng.choice(["prefill", "decode"])
        delay = self._rng.choice([0.0, self._rng.uniform(0, 0.05)])
        stop_s = self._rng.choice([0.2, 1.0, TIMEOUT_S + 1.0])
        self.found["requests"] += len(requests)
        if fault is not None:
            self.found[f"{fault}s"][victim] += 1
        process = self.prefill if victim == "prefill" else self.decode
        if fault == "kill" and delay == 0.0 and victim == "prefill":
            process.signal(signal.SIGKILL)  # kill the process before the load starts
            self._load(requests)
            process.start()
        elif fault == "kill" and victim == "decode":
            process.tell("load", requests=requests)
            time.sleep(delay)
            process.signal(signal.SIGKILL)
            self.found["lost"] += len(requests)
            process.start()
        elif fault is None:
            self._load(requests)
        else:
            if delay == 0.0:
                process.signal(signal.SIGSTOP if fault == "stop" else signal.SIGKILL)
            timer = threading.Timer(delay, self._strike, [process, fault, delay, stop_s])
            timer.start()
            self._load(requests, stop_s if victim == "decode" else 0.0)
            timer.join()
            if fault == "kill":
                process.start()

    @staticmethod
    def _strike(process: EngineProcess, fault: str, delay: float, stop_s: float) -> None:
        if fault == "kill":
            process.signal(signal.SIGKILL)
            return
        if delay:
            process.signal(signal.SIGSTOP)
        time.sleep(stop_s)
        process.signal(signal.SIGCONT)

    def _request(self) -> dict:
        """Compute a request and publish its offer. The offer is None if the sender is full."""
        rng, self._number = self._rng, self._number + 1
        shared = [rng.randrange(4)] * rng.choice([0, 64, 130])
        tokens = [*shared, *(rng.randrange(50_000) for _ in range(rng.randint(1, 150)))]
        name = f"r{self._number}"
        lease_s = 0.05 if rng.random() < 0.05 else LEASE_S
        offer = self.prefill.ask("prefill", id=name, tokens=tokens, lease_s=lease_s)["offer"]
        return {"id": name, "tokens": [*tokens, 7], "offer": offer}

    def _load(self, requests: list[dict], own_stop_s: float = 0.0) -> None:
        most = TIMEOUT_S + self._margin_s + own_stop_s
        for each in self.decode.ask("load", requests=requests, timeout_s=120)["results"]:
            error = each["error"]
            self.found["computed" if error else "loaded"] += 1
            if error:
                reason = " ".join(word for word in error.split() if not any(map(str.isdigit, word)))
                self.found["reasons"][reason] = self.found["reasons"].get(reason, 0) + 1
            if each["wait_s"] - each["starved_s"] > most:
                self.found["hanging"] += 1
                print(f"hanging: {each}", flush=True)
            if not own_stop_s and each["wait_s"] > self.found["worst_wait_s"]:
                self.found["worst_wait_s"] = round(each["wait_s"], 3)
                self.found["of_that_without_a_core_s"] = round(each["starved_s"], 3)
            if each["wrong"] is not None:
                self.found["wrong"] += 1
                print(f"wrong: {each}", flush=True)
        if self._progress:
            print(f"{self.found['requests']} requests", end="\r", flush=True)

    def _check_leaks(self) -> None:
        """Count each pool that is not empty after its leases have expired as leaked."""
        for name, process in (("prefill", self.prefill), ("decode", self.decode)):
            seconds = LEASE_S + TIMEOUT_S + self._margin_s
            answer = process.ask("drained", timeout_s=60, seconds=seconds)
            if not answer["drained"]:
                self.found["leaked"] += 1
                print(f"leaked: {name}", flush=True)
