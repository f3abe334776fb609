# SPDX-License-Identifier: Apache-2.0
"""Measures whether a server under attack answers honest clients correctly and in time.

`python -m tests.machinery.http.storm --turns N --seed S` starts `kvcache serve`. In each turn, the
same honest clients run alone first, and then together with hostile clients, which are threads of
another process. The hostile clients send the random requests of `fuzz`, large bodies, many prompts,
many samples and many stop strings. Others disconnect in the middle of a stream, do not read, send
single bytes slowly, or stay silent. The output is the number
of correct answers, the honest clients' p99 latency without and with hostile clients (each the
median over the turns), and the ratio of the two.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.sharedctypes import Synchronized

from tests.machinery.forked import context
from tests.machinery.http import fuzz
from tests.machinery.http.process import Reply, ServeProcess, ask, connect, request_of, text_of

PATH = "/v1/completions"
OPTIONS = ["--max-model-len=512", "--max-num-seqs=32", "--budget=16MiB", "--request-timeout=5"]
NUM_HONEST, PER_TURN, PAUSE = 4, 15, 0.02
_NICE = 5
BODY = {"model": "llama", "temperature": 0}


# --- honest clients -------------------------------------------------------------------------------


def honest_bodies(seed: int, per_turn: int) -> list[list[dict]]:
    """Return the requests of each honest client in a turn, in order."""
    rng = random.Random(seed)
    return [
        [
            BODY
            | {
                "prompt": "".join(chr(rng.randint(97, 122)) for _ in range(rng.randint(10, 60))),
                "max_tokens": rng.randint(16, 32),
                "stream": rng.random() < 0.5,
            }
            for _ in range(per_turn)
        ]
        for _ in range(NUM_HONEST)
    ]


class Honest:
    """The honest clients, which record the latencies of a turn and check the answers."""

    def __init__(self, port: int, seed: int, per_turn: int) -> None:
        self._port, self._bodies = port, honest_bodies(seed, per_turn)
        self._wanted: list[list[str | None]] = [
            [text_of(ask(port, "POST", PATH, body)) for body in bodies] for bodies in self._bodies
        ]
        assert all(text is not None for texts in self._wanted for text in texts)
        self.num_asked = 0
        self.wrong: list[tuple[dict, Reply]] = []

    def turn(self) -> list[float]:
        """Run all clients in parallel. Return the seconds that each request took."""
        seconds: list[float] = []

        def client(bodies: list[dict], wanted: list[str | None]) -> None:
            for body, text in zip(bodies, wanted):
                started = time.perf_counter()
                reply = ask(self._port, "POST", PATH, body)
                seconds.append(time.perf_counter() - started)
                self.num_asked += 1
                if text_of(reply) != text:
                    self.wrong.append((body, reply))
                time.sleep(PAUSE)

        threads = [threading.Thread(target=client, args=x) for x in zip(self._bodies, self._wanted)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return seconds


# --- hostile clients ------------------------------------------------------------------------------


class Hostile:
    """A hostile client. Each public method is one kind of attack, which the client repeats."""

    def __init__(self, port: int, seed: int) -> None:
        self._port, self._rng = port, random.Random(seed)

    def _post(self, body: bytes | dict, path: str = PATH) -> Reply:
        return ask(self._port, "POST", path, body, 20)

    def _own(self, **more: object) -> dict:
        return BODY | {"prompt": f"evil {self._rng.random()} " * 3, "max_tokens": 16} | more

    def random(self) -> None:
        fuzz.send(self._port, fuzz.case_of(self._rng))

    def most_stops(self) -> None:
        self._post(self._own(stop=["z" * 127 + chr(97 + i) for i in range(16)], max_tokens=60))

    def large_body(self) -> None:
        self._post(b'{"model":"llama","prompt":"' + b"a" * 3_000_000 + b'"}')

    def many_prompts(self) -> None:
        prompts = [[self._rng.randrange(500), 1] for _ in range(self._rng.choice([64, 5_000]))]
        self._post(self._own(prompt=prompts, max_tokens=8))

    def many_samples(self) -> None:
        self._post(self._own(n=8, temperature=1.0, max_tokens=40))

    def leaves_a_stream(self) -> None:
        with connect(self._port, 20) as connection:
            body = self._own(stream=True, max_tokens=300)
            connection.sendall(request_of("POST", PATH, body))
            connection.recv(2_000)

    def does_not_read(self) -> None:
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            connection.settimeout(20)
            connection.connect(("127.0.0.1", self._port))
            connection.sendall(request_of("POST", PATH, self._own(stream=True, max_tokens=200)))
            time.sleep(1)

    def one_byte_after_the_other(self) -> None:
        with connect(self._port, 20) as connection:
            for byte in request_of("POST", PATH, self._own())[:60]:
                connection.sendall(bytes([byte]))
                time.sleep(0.1)

    def silent(self) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                connection = stack.enter_context(connect(self._port, 20))
                connection.sendall(self._rng.choice([b"", b"POST", b"GET / HTTP/1.1\r\n"]))
            time.sleep(3)


KINDS = [name for name in vars(Hostile) if not name.startswith("_")]


def be_hostile(port: int, seed: int, pause: float, is_over: object, num_acts: object) -> None:
    """Run the process of the hostile clients, with one thread per kind of attack.

    The process has a lower priority than the server, since real clients do not use the server's
    cores.
    """
    os.nice(_NICE)

    def client(kind: str, number: int) -> None:
        hostile = Hostile(port, seed + number)
        act: Callable[[], None] = getattr(hostile, kind)
        while not is_over.is_set():
            with contextlib.suppress(OSError):
                act()
            with num_acts.get_lock():
                num_acts.value += 1
            time.sleep(pause)

    threads = [
        threading.Thread(target=client, args=(kind, i), daemon=True) for i, kind in enumerate(KINDS)
    ]
    for thread in threads:
        thread.start()
    is_over.wait()


@contextlib.contextmanager
def hostile_clients(port: int, seed: int, pause: float) -> Iterator[Synchronized]:
    """Run hostile clients during the block. Yields a shared counter of attacks."""
    is_over, num_acts = context.Event(), context.Value("q", 0)
    process = context.Process(target=be_hostile, args=(port, seed, pause, is_over, num_acts))
    process.start()
    try:
        while num_acts.value < len(KINDS):
            assert process.is_alive()
            time.sleep(0.05)
        yield num_acts
    finally:
        is_over.set()
        process.join(30)
        assert process.exitcode == 0


# --- the comparison -------------------------------------------------------------------------------


def p99(seconds: list[float]) -> float:
    """Return the 99th percentile, interpolated linearly."""
    return statistics.quantiles(seconds, n=100, method="inclusive")[98]


def storm(turns: int, seed: int, pause: float, per_turn: int = PER_TURN) -> tuple[float, int]:
    """Run all turns with `per_turn` requests per client.

    Return the ratio of the medians and the number of wrong answers.
    """
    alone: list[list[float]] = []
    together: list[list[float]] = []
    with ServeProcess(*OPTIONS) as server:
        honest = Honest(server.port, seed, per_turn)
        honest.turn()  # warm-up
        for turn in range(turns):
            alone.append(honest.turn())
            with hostile_clients(server.port, seed + 1_000 * turn, pause) as num_acts:
                before = num_acts.value
                together.append(honest.turn())
                count = num_acts.value - before
            server.wait_until_empty()
            print(
                f"turn {turn}: p99 alone {p99(alone[-1]) * 1e3:.0f} ms, together "
                f"{p99(together[-1]) * 1e3:.0f} ms beside {count} hostile acts",
                flush=True,
            )
        assert server.is_running
    assert "Traceback" not in server.log, server.log
    for body, reply in honest.wrong[:3]:
        print(f"wrong: {body} -> {reply}")
    figures = {}
    for name, turns_of in (("alone", alone), ("together", together)):
        middle = statistics.median(statistics.median(each) for each in turns_of)
        figures[name] = statistics.median(p99(each) for each in turns_of)
        print(f"{name}: median {middle * 1e3:.0f} ms, p99 {figures[name] * 1e3:.0f} ms")
    num_right = honest.num_asked - len(honest.wrong)
    ratio = figures["together"] / figures["alone"]
    print(f"{num_right} of {honest.num_asked} honest answers correct; p99 ratio {ratio:.2f}")
    return ratio, len(honest.wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--pause", type=float, default=0.2, help="seconds between hostile acts")
    args = parser.parse_args()
    print(f"seed {args.seed}; {NUM_HONEST} honest clients, {len(KINDS)} hostile", flush=True)
    ratio, num_wrong = storm(args.turns, args.seed, args.pause)
    return int(num_wrong > 0 or ratio > 2)


if __name__ == "__main__":
    sys.exit(main())
