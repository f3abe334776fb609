# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.fleet_times`: times of a simulated fleet compared to those of real engines.

    python -m benchmarks.fleet_times --replicas 2 --requests 60

Starts processes of `kvcache serve` with a tiny model, and measures their constants one at a time: the
time to first token of prompts that are not cached, by length, and the speed of answers. The same chats
are then sent to the processes round robin at their arrival times, and simulated with these constants.
Both times and the difference are printed. On a machine with other work, repeat the run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import subprocess
import sys
import threading
import time
import urllib.request

import numpy as np

from benchmarks.gpu.machine import processor
from kvcache.replay import WorkloadRequest
from kvcache.replay.content import prefix_keys
from kvcache.replay.fleet import Fleet, Hardware
from kvcache.replay.fleet.simulation import Simulation

BLOCK, LONGEST, VOCABULARY = 16, 1024, 512
LENGTHS, REPEATS = (64, 256, 512, 960), 5
ANSWER = 16


class Engine:
    """A process of `kvcache serve` with a tiny model."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "kvcache", "serve", "llama", "--port", "0"]
        command += ["--block-size", str(BLOCK), "--max-model-len", str(LONGEST)]
        command += ["--max-num-batched-tokens", str(LONGEST)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        lines = iter(self.process.stderr.readline, "")
        self.url = next(filter(None, (re.search(r"http://\S+/v1", line) for line in lines)))[0]
        threading.Thread(target=lambda: [*lines], daemon=True).start()

    def answer(self, tokens: list[int], num_tokens: int) -> tuple[float, float, int]:
        """Complete a prompt. Return the milliseconds to the first token and to the end, and the hits."""
        body = {"model": "llama", "prompt": tokens, "max_tokens": num_tokens, "stream": True}
        body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
        request = urllib.request.Request(
            f"{self.url}/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        begin, first_ms, cached = time.perf_counter(), None, 0
        with urllib.request.urlopen(request, timeout=60) as response:
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                first_ms = first_ms or 1000 * (time.perf_counter() - begin)
                usage = json.loads(line[6:]).get("usage") or {}
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", cached)
        return first_ms, 1000 * (time.perf_counter() - begin), cached

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)


def measured(engine: Engine, rng: random.Random) -> tuple[float, float, float]:
    """Return the milliseconds of every request, and the tokens per second of prefill and decode."""
    times, steps = [], []
    for length in LENGTHS:
        found = []
        for _ in range(REPEATS):
            first_ms, end_ms, _ = engine.answer(_tokens(rng, length), ANSWER)
            found.append(first_ms)
            steps.append((end_ms - first_ms) / (ANSWER - 1))
        times.append(float(np.median(found)))
    slope, constant = np.polyfit(LENGTHS, times, 1)
    return max(constant, 0.0), 1000 / max(slope, 1e-6), 1000 / float(np.median(steps))


def chats(rng: random.Random, num_requests: int, gap_ms: float) -> list[WorkloadRequest]:
    """Return turns of interleaved chats."""
    histories: list[list[int]] = [[] for _ in range(6)]
    requests, now_ms = [], 0.0
    for index in range(num_requests):
        history = histories[rng.randrange(len(histories))]
        if len(history) > LONGEST - 200:
            history.clear()
        history += _tokens(rng, rng.randrange(40, 160))
        tokens = np.array(history, np.int32)
        requests.append(WorkloadRequest(index, round(now_ms), tokens, ANSWER, prefix_keys(tokens)))
        now_ms += rng.expovariate(1 / gap_ms)
    return requests


def replayed(engines: list[Engine], requests: list[WorkloadRequest]) -> np.ndarray:
    """Send the requests at their arrival times. Return milliseconds to first token and hits, [n, 2]."""
    found = np.zeros((len(requests), 2))

    def send(item: WorkloadRequest) -> None:
        engine = engines[item.index % len(engines)]
        first_ms, _, cached = engine.answer(item.token_ids.tolist(), item.output_length)
        found[item.index] = first_ms, cached

    threads, begin = [], time.perf_counter()
    for item in requests:
        time.sleep(max(begin + item.arrival_ms / 1000 - time.perf_counter(), 0.0))
        threads.append(threading.Thread(target=send, args=(item,)))
        threads[-1].start()
    for each in threads:
        each.join()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet_times", description=__doc__)
    parser.add_argument("--replicas", type=int, default=2, help="number of engines; default 2")
    parser.add_argument("--requests", type=int, default=60, help="number of chat turns; default 60")
    parser.add_argument(
        "--gap", type=float, default=400.0, help="mean milliseconds between arrivals"
    )
    args = parser.parse_args()
    rng = random.Random(0)
    with contextlib.ExitStack() as stack:
        engines = []
        for _ in range(args.replicas):
            engines.append(Engine())
            stack.callback(engines[-1].close)
        for each in engines:
            each.answer(_tokens(rng, LENGTHS[-1]), ANSWER)
        constant_ms, prefill_speed, decode_speed = measured(engines[0], rng)
        requests = chats(rng, args.requests, args.gap)
        real = replayed(engines, requests)
    fleet = Fleet(args.replicas, 20_001, BLOCK, router="round_robin", num_preallocate_tokens=64)
    hits = []
    simulation = Simulation(
        *(fleet, Hardware(prefill_speed, decode_speed)),
        on_request=lambda item, replica, served: hits.append(served.num_hit),
    )
    simulation.run(requests)
    planned = simulation.outcomes.ms_to_first_token + constant_ms
    print(f"{processor()}, {args.replicas} engines, {args.requests} requests")
    print(
        f"measured: {constant_ms:.1f} ms per request, prefill {prefill_speed:,.0f} tokens/s, decode "
        f"{decode_speed:,.0f} tokens/s"
    )
    print(f"hits: {sum(hits):,} planned, {int(real[:, 1].sum()):,} real, ", end="")
    print(f"{sum(a != b for a, b in zip(hits, real[:, 1]))} requests differ")
    print("time to first token (ms)   planned      real   difference")
    for name, of in (
        ("mean", np.mean),
        ("p50", np.median),
        ("p90", lambda x: np.percentile(x, 90)),
    ):
        a, b = float(of(planned)), float(of(real[:, 0]))
        print(f"{name:24} {a:9.1f} {b:9.1f}   {a / b - 1:+10.1%}")
    return 0


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, VOCABULARY) for _ in range(count)]


if __name__ == "__main__":
    sys.exit(main())
