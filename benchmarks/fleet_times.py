# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.fleet_times`: compares the times of a simulated fleet with those of real
engines.

    python -m benchmarks.fleet_times --replicas 2 --requests 200

Starts `kvcache serve` processes with a small model, each on its own core, and measures their
constants: the time to first token as a function of the numbers of cached and computed tokens, and
the speed of an answer as a function of the number of concurrent answers. Chats are then sent to the
processes in round-robin order at their arrival times. The same chats are simulated with these
constants, and with the speed for the mean number of concurrent answers in the simulation. The
program prints the simulated and the measured times to the first and to the last token. The
simulation uses nothing that was measured while the chats were sent. If the machine also does other
work, repeat the run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from benchmarks.measure import add_json, save
from kvcache_lab import WorkloadRequest
from kvcache_lab.content import prefix_keys
from kvcache_lab.fleet import Fleet, Hardware
from kvcache_lab.fleet.simulation import Simulation
from kvcache_lab.running import Running

BLOCK, LONGEST, VOCABULARY = 16, 1024, 512
HITS, LENGTHS, REPEATS = (0, 256, 512, 800), (16, 64, 128, 200, 512, 960), 6
ANSWER, MOST_ANSWERS = 16, 4


class Engine:
    """A `kvcache serve` process on one core."""

    def __init__(self, checkpoint: str, core: int) -> None:
        command = [sys.executable, "-m", "kvcache", "serve", checkpoint, "--port", "0"]
        command += ["--block-size", str(BLOCK), "--max-model-len", str(LONGEST)]
        command += ["--max-num-batched-tokens", str(LONGEST)]
        command += ["--budget", "1GiB"]
        self.model = os.path.basename(checkpoint)
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        os.sched_setaffinity(self.process.pid, {core})
        lines = iter(self.process.stderr.readline, "")
        self.url = next(filter(None, (re.search(r"http://\S+/v1", line) for line in lines)))[0]
        threading.Thread(target=lambda: [*lines], daemon=True).start()

    def answer(self, tokens: list[int], num_tokens: int) -> tuple[float, float, int]:
        """Complete a prompt. Return the milliseconds to the first token and to the end, and the
        number of hit tokens.
        """
        body = {"model": self.model, "prompt": tokens, "max_tokens": num_tokens, "stream": True}
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


def save_checkpoint(folder: str) -> None:
    """Save a Llama model with random weights that is so large that prefills take longer than the
    server's other work.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **{"vocab_size": VOCABULARY, "hidden_size": 384, "intermediate_size": 1024},
        **{"num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 2},
        max_position_embeddings=LONGEST,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def measured(engines: list[Engine], rng: random.Random, gap_ms: float) -> Hardware:
    """Measure the speeds of engines that work at the same time, each on one request at a time.

    Before each request, an engine pauses for `gap_ms` on average, because processors are slower
    after a pause.
    """
    firsts: dict[tuple[int, int], list[float]] = {}
    steps: list[float] = []

    def measure(engine: Engine, seed: int) -> None:
        rng = random.Random(seed)
        cases = [(hit, length) for hit in HITS for length in LENGTHS] * REPEATS
        rng.shuffle(cases)
        for hit, length in cases:
            if hit + length + ANSWER > LONGEST:
                continue
            tokens = _tokens(rng, hit + length)
            if hit:
                engine.answer(tokens[: hit + 1], 1)
            time.sleep(rng.expovariate(1 / gap_ms) / 1000)
            first_ms, end_ms, cached = engine.answer(tokens, ANSWER)
            assert cached == hit
            firsts.setdefault((hit, length), []).append(first_ms)
            steps.append((end_ms - first_ms) / (ANSWER - 1))

    with ThreadPoolExecutor(len(engines)) as pool:
        [*pool.map(measure, engines, [rng.randrange(2**32) for _ in engines])]
    hits, lengths = np.array([*firsts], float).T
    times = np.array([np.mean(each) for each in firsts.values()])
    terms = np.stack([np.ones_like(times), lengths, lengths * (hits + (lengths + 1) / 2)])
    constant, per_token, per_pair = np.linalg.lstsq((terms / times).T, np.ones_like(times))[0]
    return Hardware(
        prefill_speed=1000 / max(per_token, 1e-3),
        decode_speed=1000 / float(np.mean(steps)),
        prefill_ms=max(constant, 0.0),
        attention_ns=1e6 * max(per_pair, 0.0),
    )


def step_times(engine: Engine, rng: random.Random) -> list[float]:
    """Return the duration of a step in milliseconds, with 1, 2, ... concurrent answers."""

    def step_ms(tokens: list[int]) -> float:
        first_ms, end_ms, _ = engine.answer(tokens, 4 * ANSWER)
        return (end_ms - first_ms) / (4 * ANSWER - 1)

    found = []
    with ThreadPoolExecutor(MOST_ANSWERS) as pool:
        for count in range(1, MOST_ANSWERS + 1):
            times = [
                list(pool.map(step_ms, [_tokens(rng, LENGTHS[0]) for _ in range(count)]))
                for _ in range(REPEATS)
            ]
            found.append(float(np.mean(times)))
    return found


def simulated(
    requests: list[WorkloadRequest], fleet: Fleet, hardware: Hardware
) -> tuple[Simulation, list[Running], float]:
    """Return the simulation, its requests, and the mean number of concurrent answers."""
    served: list[Running] = []
    replicas: list[int] = []

    def observe(item: WorkloadRequest, replica: int, running: Running) -> None:
        served.append(running)
        replicas.append(replica)

    simulation = Simulation(fleet, hardware, on_request=observe)
    simulation.run(requests)
    alone, together = 0.0, 0.0
    for replica, each in zip(replicas, served):
        alone += each.end_ms - each.first_ms
        together += sum(
            max(min(each.end_ms, other.end_ms) - max(each.first_ms, other.first_ms), 0.0)
            for number, other in zip(replicas, served)
            if number == replica
        )
    return simulation, served, together / alone


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
    """Send the requests at their arrival times.

    Returns, for each request, the milliseconds to the first and to the last token, and the number
    of hit tokens, as [n, 3].
    """
    found = np.zeros((len(requests), 3))

    def send(item: WorkloadRequest) -> None:
        engine = engines[item.index % len(engines)]
        found[item.index] = engine.answer(item.token_ids.tolist(), item.output_length)

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
    parser.add_argument(
        "--requests", type=int, default=200, help="number of chat turns; default 200"
    )
    parser.add_argument(
        "--gap", type=float, default=400.0, help="mean milliseconds between arrivals; default 400"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the chats; default 0")
    add_json(parser)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        save_checkpoint(folder)
        engines = []
        cores = sorted(os.sched_getaffinity(0))
        for number in range(args.replicas):
            engines.append(Engine(folder, cores[number % len(cores)]))
            stack.callback(engines[-1].close)
        for each in engines:
            each.answer(_tokens(rng, LENGTHS[-1]), ANSWER)
        hardware = measured(engines, rng, args.gap)
        steps = step_times(engines[0], rng)
        requests = chats(rng, args.requests, args.gap)
        real = replayed(engines, requests)
    fleet = Fleet(args.replicas, 20_001, BLOCK, router="round_robin", num_preallocate_tokens=64)
    # The speed of an answer depends on the number of concurrent answers, which in turn depends on
    # the speed. Therefore, the fleet is simulated twice.
    simulation, served, num_answers = simulated(requests, fleet, hardware)
    counts = range(1, MOST_ANSWERS + 1)
    step_ms = float(np.interp(num_answers, counts, steps)) - steps[0] + 1000 / hardware.decode_speed
    hardware = replace(hardware, decode_speed=1000 / step_ms)
    simulation, served, num_answers = simulated(requests, fleet, hardware)
    planned = np.array(
        [
            (each.first_ms - each.item.arrival_ms, each.end_ms - each.item.arrival_ms)
            for each in served
        ]
    )
    hits = np.array([each.num_hit for each in served])
    found: dict = {
        "options": f"--requests {args.requests} --seed {args.seed} --gap {args.gap:g}",
        "measured": f"a prefill takes {hardware.prefill_ms:.1f} ms, "
        f"{1000 / hardware.prefill_speed:.3f} ms per token and {hardware.attention_ns:,.0f} ns per "
        f"pair of tokens; {hardware.decode_speed:,.0f} tokens/s per answer with {num_answers:.1f} "
        f"running (1 to {MOST_ANSWERS}: {', '.join(f'{1000 / ms:.0f}' for ms in steps)})",
        "prefills": f"{simulation.report.busy_share:.0%} of the time",
        "hits": f"{hits.sum():,} planned, {int(real[:, 2].sum()):,} real, "
        f"{(hits != real[:, 2]).sum()} requests differ",
        "times": {},
    }
    for name in ("options", "measured", "prefills", "hits"):
        print(f"{name}: {found[name]}")
    print("milliseconds                    planned      real   difference")
    for column, token in enumerate(("first", "last")):
        for name, of in (
            ("mean", np.mean),
            ("p50", np.median),
            ("p90", lambda x: np.percentile(x, 90)),
            ("p99", lambda x: np.percentile(x, 99)),
        ):
            a, b = (float(of(each[:, column])) for each in (planned, real))
            what = f"to the {token} token, {name}"
            found["times"][what] = {"planned_ms": a, "real_ms": b}
            print(f"{what:29} {a:9.1f} {b:9.1f}   {a / b - 1:+10.1%}")
    save(args.json, f"fleet times, seed {args.seed}", {"results": [found]})
    return 0


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, VOCABULARY) for _ in range(count)]


if __name__ == "__main__":
    sys.exit(main())
