# SPDX-License-Identifier: Apache-2.0
"""Runs a fleet of `kvcache serve` in network namespaces while processes are killed and links fail.

    python -m tests.machinery.fleet_faults [--replicas N] [--seconds S] [--no-store] [--json FILE]

The clients, the router (Dynamo's indexer), the store (Mooncake), each replica, a prefill server and
a decode server run in separate namespaces. Clients send each request to the replica that, according
to the router, has cached most of the prompt. Every answer is compared to the answer of the model
without a cache. After each fault, no server may hold a block, and the router's index must list
exactly the cached blocks.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import zmq

from benchmarks.measure import add_json, save
from kvcache import KVCacheManager, Request
from kvcache_exchange.router_events import EventPublisher, EventSubscriber
from kvcache_serve.engine.transformers.tiny_models import tiny_model
from kvcache_serve.server import ByteTexts
from tests.machinery import mooncake_master, network
from tests.machinery.dynamo_indexer import BLOCK, Indexer
from tests.machinery.http.process import ServeProcess, ask, connect, reply_of, request_of
from tests.machinery.network import Faults, Network

HTTP, EVENTS, REPLAYS = 8000, 5557, 5558
# Numbers of tokens in a session's prefix, in the rest of a prompt, and in an answer.
PREFIX, SUFFIX, NUM_TOKENS = 128, 20, 4
CLIENTS, ANSWER_S, QUERY_S, DOWN_S = 3, 30.0, 1.0, 1.0
PREFILL_TIMEOUT_S = 2
WINDOW = 12  # number of requests over which the hit rate must have recovered
BAD = Faults(loss=0.02, delay_s=(0.002, 0.015))
ROUTER, STORE, CLIENT = "router", "store", "client"
LIAR = 100  # wrong entries about replica i are registered as instance LIAR + i
NUM_LIES = 400


@dataclass
class Answer:
    """An answered request. `ended` is a time on the monotonic clock."""

    prompt: list[int]
    text: str
    num_hits: int  # prompt tokens that the server had cached, or loaded from the prefill server
    ended: float
    seconds: float
    is_counted: bool  # whether the request is included in the hit rate


def hit_rate(answers: Iterable[Answer]) -> float | None:
    """Return the fraction of prompt tokens that were hits, or None if there are no requests."""
    answers = [each for each in answers if each.is_counted]
    total = sum(len(each.prompt) for each in answers)
    return sum(each.num_hits for each in answers) / total if total else None


class Server:
    """A `kvcache serve` process in its own namespace. It can be killed and restarted."""

    def __init__(self, fleet: Fleet, name: str, *options: str) -> None:
        self.fleet, self.name, self.number = fleet, name, len(fleet.servers)
        self.address = fleet.network.addresses[name]
        self.endpoints = tuple(f"tcp://{self.address}:{port}" for port in (EVENTS, REPLAYS))
        self.options = (
            *("--host", self.address, "--port", str(HTTP), "--log-level", "error"),
            *("--block-size", str(BLOCK), "--budget", "2MiB", "--max-model-len", "512", *options),
        )
        with fleet.network.inside(name):  # sockets of this context belong to the namespace
            self.context = zmq.Context()
            self.context.socket(zmq.SUB).close()
        self.down_until = 0.0
        self.process: ServeProcess | None = None
        fleet.servers.append(self)

    def start(self) -> None:
        self.process = ServeProcess(
            *self.options, namespace=self.fleet.network.namespaces[self.name]
        )
        with self.fleet.network.inside(self.name):
            self.process.__enter__()

    def kill(self) -> None:
        if self.process is not None and self.process.is_running:
            self.process.send_signal(signal.SIGKILL)
            self.process.__exit__()

    def close(self) -> None:
        self.kill()
        self.context.destroy(linger=0)

    def state(self) -> dict:
        with self.fleet.network.inside(self.name):
            return self.process.state()

    def leaks(self) -> dict:
        """Return counts of sequences and blocks that the server still holds. The result is empty if
        nothing has leaked.
        """
        state = self.state()
        pool = state["pool"]
        found = {"sequences": state["num_sequences"], "held": pool["held"] + pool["held_cached"]}
        for each in state["sources"]:
            for name in ("loading_requests", "quarantined_blocks"):
                found[name] = found.get(name, 0) + each[name]
        return {name: count for name, count in found.items() if count}

    def hashes(self) -> set[int]:
        """Return the hashes of all cached blocks, according to the server's events, which are read
        over the loopback device.
        """
        with EventSubscriber(*self.endpoints, context=self.context) as reader:
            until = time.monotonic() + 20
            while not reader.catch_up():
                assert time.monotonic() < until, f"{self.name} does not replay its events"
            return reader.view.hashes()


class Fleet:
    """A fleet that exists during its `with` block."""

    def __init__(
        self, num_replicas: int = 3, seconds: float = 4.0, seed: int = 1, *, has_store: bool = True
    ) -> None:
        self.has_store = has_store
        self.seconds, self.rng = seconds, random.Random(seed)
        self.names = [f"replica {i}" for i in range(num_replicas)]
        self.network = Network(CLIENT, ROUTER, STORE, *self.names, "prefill", "decode", seed=seed)
        self.servers: list[Server] = []
        self.sessions = [self.tokens(PREFIX) for _ in range(3 * num_replicas)]
        self.answers: list[Answer] = []
        self.lost: list[str] = []  # requests that no replica answered
        self.rows: list[dict] = []
        self._model = tiny_model("llama", dtype=torch.float64)
        self._turn, self._running = 0, False
        self._num_loaded, self._lock = 0, threading.Lock()
        # Prompts that the router falsely lists as cached.
        self._lies: dict[tuple[int, ...], None] = {}
        self._untold: Iterator[tuple[int, ...]] = iter(())
        self.num_misled = self.num_unrouted = 0
        self._request: Callable[[], None] = self.request_by_index
        self._stack = ExitStack()

    def __enter__(self) -> Fleet:
        with ExitStack() as stack:
            stack.enter_context(self.network)
            addresses = self.network.addresses
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            with self.network.inside(STORE):
                self.master = mooncake_master.Master(addresses[STORE])
                self.master.start()
            stack.callback(self.master.kill)
            self.start_router()
            stack.callback(lambda: self.indexer.close())
            store = ("--store", f"mooncake://{self.master.address}", "--store-capacity", "32MiB")
            for name in self.names:
                events = (f"tcp://{addresses[name]}:{port}" for port in (EVENTS, REPLAYS))
                events = [*zip(("--events", "--events-replay"), events)]
                Server(
                    self,
                    name,
                    *(store if self.has_store else ()),
                    *(each for pair in events for each in pair),
                )
            timeout = ("--prefill-timeout", str(PREFILL_TIMEOUT_S))
            Server(self, "prefill", "--prefill", *timeout)
            Server(self, "decode", "--prefill-from", f"{addresses['prefill']}:{HTTP}", *timeout)
            self.replicas = self.servers[: len(self.names)]
            self.prefill, self.decode = self.servers[len(self.names) :]
            for each in self.servers:
                stack.callback(each.close)
            with ThreadPoolExecutor(2) as threads:
                list(threads.map(Server.start, self.servers))
            self.register()
            time.sleep(0.5)  # wait until the router's sockets are connected
            for i, session in enumerate(self.sessions):
                self.send(self.replicas[i % len(self.replicas)], session)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # Requests ----------------------------------------------------------------------------------------

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(3, 256) for _ in range(count)]

    def num_wrong(self) -> int:
        """Return how many answers differ from the model's answers without a cache."""
        by_length: dict[int, list[Answer]] = {}
        for each in self.answers:
            by_length.setdefault(len(each.prompt), []).append(each)
        num_wrong = 0
        for length, answers in by_length.items():
            tokens = torch.tensor([each.prompt for each in answers])
            with torch.inference_mode():
                for _ in range(NUM_TOKENS):
                    logits = self._model(tokens, use_cache=False, logits_to_keep=1).logits
                    tokens = torch.cat([tokens, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
            texts = [ByteTexts().decode(each) for each in tokens[:, length:].tolist()]
            num_wrong += sum(each.text != text for each, text in zip(answers, texts))
        return num_wrong

    def send(self, server: Server, prompt: list[int], is_counted: bool = True) -> bool:
        """Send a request from the clients' namespace. Return whether the server has answered the
        request.
        """
        body = {"model": "llama", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
        began = time.monotonic()
        try:
            with self.network.inside(CLIENT):
                path = "/v1/completions"
                reply = ask(HTTP, "POST", path, body, ANSWER_S, host=server.address)
        except OSError:
            return False
        if reply.status != 200:
            return False
        value = json.loads(reply.body)
        now = time.monotonic()
        if server is self.decode:
            num_hits = self.new_loads()
        else:
            num_hits = value["usage"]["prompt_tokens_details"]["cached_tokens"]
        text = value["choices"][0]["text"]
        self.answers.append(Answer(prompt, text, num_hits, now, now - began, is_counted))
        return True

    def new_loads(self) -> int:
        """Return the number of tokens that the decode server has loaded since the last call.

        They are not part of an answer's cached tokens. The loads of requests that are answered at
        the same time may be counted with either answer.
        """
        with self._lock:
            (source,) = self.decode.state()["sources"]
            before, self._num_loaded = self._num_loaded, source["counts"]["loaded_tokens"]
            return self._num_loaded - before

    def scores(self, prompt: list[int]) -> dict[int, int]:
        """Query the router for the number of prompt tokens that each replica has cached. The result
        is empty if the router does not answer.
        """
        body = {"token_ids": prompt, "model_name": "m", "block_size": BLOCK}
        with suppress(OSError, ValueError, KeyError), self.network.inside(CLIENT):
            host = self.network.addresses[ROUTER]
            with connect(self.indexer.port, QUERY_S, host) as connection:
                kind = "Content-Type: application/json\r\n"
                connection.sendall(request_of("POST", "/query", body, more=kind))
                found = json.loads(reply_of(connection, QUERY_S).body)["instances"]
            scores: dict[int, int] = {}
            for number, each in found.items():
                number = int(number) % LIAR
                scores[number] = max(scores.get(number, 0), each["gpu"])
            return scores
        self.num_unrouted += 1
        return {}

    def request_by_index(self) -> None:
        """Continue a session on the replica that has cached most of the prompt. Ties are broken by
        round-robin.
        """
        self.send_by_index(self.rng.choice(self.sessions) + self.tokens(SUFFIX))

    def send_by_index(self, prompt: list[int]) -> None:
        scores = self.scores(prompt)
        self.num_misled += (
            tuple(prompt[:PREFIX]) in self._lies and max(scores.values(), default=0) > 0
        )
        self._turn += 1
        turn, most = self._turn, len(self.replicas)
        order = sorted(
            self.replicas,
            key=lambda each: (-scores.get(each.number, 0), (each.number - turn) % most),
        )
        for each in order:
            if time.monotonic() < each.down_until:
                continue
            if self.send(each, prompt):
                return
            each.down_until = time.monotonic() + DOWN_S
        self.lost.append(f"no replica answers at {time.monotonic():.1f}")
        time.sleep(0.1)

    def request_of_lies(self) -> None:
        """Send a prompt that the router falsely lists as cached."""
        try:
            self.send_by_index([*next(self._untold), *self.tokens(SUFFIX)])
        except StopIteration:
            self.request_by_index()

    def request_by_store(self) -> None:
        """Compute a new prompt on one replica, and send it to another replica, which finds it in
        the store.
        """
        first, second = self.rng.sample(self.replicas, 2)
        prompt = self.tokens(PREFIX)
        if not self.send(first, prompt, is_counted=False):
            self.lost.append(first.name)
        time.sleep(0.15)  # wait until the blocks are stored
        if not self.send(second, prompt):
            self.lost.append(second.name)

    def request_by_prefill(self) -> None:
        if not self.send(self.decode, self.tokens(PREFIX + SUFFIX)):
            self.lost.append(self.decode.name)

    def _client(self) -> None:
        while self._running:
            self._request()

    # Scenarios ---------------------------------------------------------------------------------------

    def start_router(self) -> None:
        with self.network.inside(ROUTER):
            self.indexer = Indexer(self.folder, self.network.addresses[ROUTER])

    def register(self) -> None:
        with self.network.inside(ROUTER):
            for each in self.replicas:
                self.indexer.register(each.number, *each.endpoints)

    def listed(self, replica: Server) -> set[int]:
        """Return the hashes of a replica's blocks in the router's index."""
        with self.network.inside(ROUTER):
            dump = self.indexer.call("/dump")
            if not dump.get("m:default", {}).get("events"):
                return set()
            return {each for medium, each in self.indexer.blocks(replica.number) if medium == "GPU"}

    def scenario(
        self,
        name: str,
        fault: Callable[[], None],
        heal: Callable[[], None],
        *,
        request: Callable[[], None] | None = None,
        fault_s: float | None = None,
    ) -> dict:
        """Run a scenario with traffic, check that nothing leaks, and return the scenario's row in
        the table of results.
        """
        self._request = request or self.request_by_index
        self.answers, self.lost, self._running = [], [], True
        self.num_unrouted = 0
        clients = [threading.Thread(target=self._client) for _ in range(CLIENTS)]
        for each in clients:
            each.start()
        try:
            began = time.monotonic()
            time.sleep(self.seconds)
            while len(self.answers) < WINDOW:
                assert time.monotonic() < began + 60, f"{len(self.answers)} requests are answered"
                time.sleep(0.05)
            before = time.monotonic()
            fault()
            faulted = time.monotonic()
            time.sleep(self.seconds if fault_s is None else fault_s)
            heal()
            healed = time.monotonic()
            index_s = self._until_listed(healed) if request is None else None
            usual = hit_rate(each for each in self.answers if began < each.ended < before)
            hits_s, recovered = self._until_hits(healed, usual)
            time.sleep(self.seconds)
        finally:
            self._running = False
            for each in clients:
                each.join()
        answers = self.answers
        during = [each for each in answers if faulted < each.ended - each.seconds < healed]
        row = {
            "scenario": name,
            "requests": len(answers),
            "hit_rate_before": usual,
            "hit_rate_during": hit_rate(during),
            "hit_rate_after": hit_rate(each for each in answers if each.ended > recovered),
            "index_recovered_s": index_s,
            "hits_recovered_s": hits_s,
            "longest_answer_s": max(each.seconds for each in answers),
            "lost": len(self.lost),
            "without_index": self.num_unrouted,
        }
        row |= self._checked()
        self.rows.append(row)
        return row

    def _until_listed(self, since: float) -> float:
        """Wait until the index has been corrected: it lists no block that had been evicted at the
        end of the fault, and omits no block that was cached at that time.
        """
        wrong = []
        for each in self.replicas:
            cached, listed = each.hashes(), self.listed(each)
            wrong.append((cached - listed, listed - cached))
        until = time.monotonic() + 60
        while True:
            is_right = True
            for each, (missing, stale) in zip(self.replicas, wrong):
                listed = self.listed(each)
                if lacking := missing - listed:
                    is_right &= not lacking & each.hashes()
                if lying := stale & listed:
                    is_right &= lying <= each.hashes()
            if is_right:
                return time.monotonic() - since
            assert time.monotonic() < until, f"the index is not corrected: {wrong}"
            time.sleep(0.05)

    def _until_hits(self, since: float, before: float) -> tuple[float, float]:
        """Wait until the last requests have almost the same hit rate as before the fault. Return
        the number of seconds since `since`, and the time at which these requests began.
        """
        until = time.monotonic() + 60
        while True:
            after = [each for each in self.answers if each.ended - each.seconds > since]
            for first in range(len(after) - WINDOW + 1):
                some = after[first : first + WINDOW]
                if hit_rate(some) >= 0.9 * before:
                    return some[0].ended - since, some[0].ended - some[0].seconds
            assert time.monotonic() < until, f"the hit rate is {hit_rate(after[-WINDOW:])}"
            time.sleep(0.05)

    def _checked(self) -> dict:
        """Check the answers, check for leaks, and compare the index with the caches. Return all
        differences.
        """
        num_wrong = self.num_wrong()
        until = time.monotonic() + 40
        while leaks := {each.name: found for each in self.servers if (found := each.leaks())}:
            if time.monotonic() > until:
                break
            time.sleep(0.1)
        differing = {}
        if self._request == self.request_by_index:
            for each in self.replicas:  # a last event reveals the loss of earlier events
                self.send(each, self.tokens(PREFIX), is_counted=False)
                self._settle(each, differing)
        return {"wrong": num_wrong, "leaks": leaks, "index_differs": differing}

    def _settle(self, replica: Server, differing: dict) -> None:
        until = time.monotonic() + 20
        while True:
            cached, listed, state = replica.hashes(), self.listed(replica), replica.state()
            pool = state["pool"]
            # Clients that send the same prompt at the same time leave blocks with the same hash.
            blocks = range(len(cached), CLIENTS * len(cached) + 1)
            if cached == listed and pool["cached"] + pool["held_cached"] in blocks:
                return
            if time.monotonic() > until:
                differing[replica.name] = [len(cached - listed), len(listed - cached), pool]
                return
            time.sleep(0.1)

    def delay_and_loss(self) -> dict:
        def bad() -> None:
            self.network.faults = BAD

        def good() -> None:
            self.network.faults = Faults()

        return self.scenario("delay and loss on all links", bad, good)

    def router_cut(self) -> dict:
        """A replica's events are delayed, and arrive once the partition has ended."""
        return self.scenario(
            "partition between the router and a replica",
            lambda: self.network.cut(ROUTER, self.names[0]),
            self.network.heal,
        )

    def router_cut_for_long(self) -> dict:
        """The partition lasts longer than the replica's connection survives, so that events are
        lost.
        """
        name, left = self.names[0], []

        def heal() -> None:
            with self.network.inside(name):
                sockets = subprocess.run(["ss", "-tnH"], capture_output=True, text=True).stdout
            address = self.network.addresses[ROUTER]
            left.extend(each for each in sockets.splitlines() if f" {address}:" in each)
            self.network.heal()

        self.network.set(name, "net/ipv4/tcp_retries2", 1)
        try:
            row = self.scenario(
                "the same, until the connection is lost",
                lambda: self.network.cut(ROUTER, name),
                heal,
                fault_s=max(self.seconds, 4.0),
            )
        finally:
            self.network.set(name, "net/ipv4/tcp_retries2", 15)
        lost = not any(f":{EVENTS} " in each for each in left)
        row["connection_lost"] = lost
        return row

    def prefill_cut(self) -> dict:
        return self.scenario(
            "partition between the prefill and the decode server",
            lambda: self.network.cut("prefill", "decode"),
            self.network.heal,
            request=self.request_by_prefill,
        )

    def prefill_delay(self) -> dict:
        def bad() -> None:
            self.network.links[frozenset(("prefill", "decode"))] = BAD

        return self.scenario(
            "delay and loss between them", bad, self.network.heal, request=self.request_by_prefill
        )

    def replica_killed(self) -> dict:
        victim = self.replicas[-1]

        def start() -> None:
            victim.start()
            # Dynamo does not detect that a publisher has restarted.
            with self.network.inside(ROUTER):
                self.indexer.call("/unregister", instance_id=victim.number, model_name="m")
                self.indexer.register(victim.number, *victim.endpoints)

        return self.scenario("a replica is killed and restarts", victim.kill, start)

    def master_killed(self) -> dict:
        def start() -> None:
            with self.network.inside(STORE):
                self.master.start()

        return self.scenario(
            "the store's master is killed and restarts",
            *(self.master.kill, start),
            request=self.request_by_store,
        )

    def router_restarts(self) -> dict:
        def start() -> None:
            self.start_router()
            self.register()

        return self.scenario(
            "the router restarts with an empty index", lambda: self.indexer.close(), start
        )

    def index_lies(self) -> dict:
        """The router receives false events, according to which the first replica has cached some
        prompts.
        """
        address = self.network.addresses[CLIENT]
        places = [f"tcp://{address}:{port}" for port in (EVENTS, REPLAYS)]
        manager = KVCacheManager(BLOCK, num_gpu_blocks=8192, max_model_len=512, enable_events=True)
        self._lies = dict.fromkeys(tuple(self.tokens(PREFIX)) for _ in range(NUM_LIES))
        self._untold, self.num_misled = iter(list(self._lies)), 0
        with self.network.inside(CLIENT), zmq.Context() as context:
            publisher = EventPublisher(*places, allow_remote=True, context=context)

            def publish(name: str, tokens: tuple[int, ...]) -> None:
                request = Request(name, tokens)
                manager.step(new=[request])
                manager.free(request)
                publisher.publish(manager.cache.drain_events())

            for i, each in enumerate(self._lies):
                publish(f"lie {i}", each)

            def tell() -> None:
                with self.network.inside(ROUTER):
                    self.indexer.register(LIAR, *places)
                until, number = time.monotonic() + 20, NUM_LIES
                while not self.scores([*next(iter(self._lies))]):
                    # Another event reveals to the router that it has missed earlier events.
                    publish(f"lie {number}", (number,) * PREFIX)
                    time.sleep(0.1)
                    number += 1
                    assert time.monotonic() < until, "the router has not indexed the wrong entries"
                self._request = self.request_of_lies

            def stop() -> None:
                self._request = self.request_by_index

            try:
                row = self.scenario("the index lists blocks that do not exist", tell, stop)
            finally:
                publisher.close()
        row["misled"] = self.num_misled
        return row


SCENARIOS = (
    "delay_and_loss",
    "router_cut",
    "router_cut_for_long",
    "replica_killed",
    "index_lies",
    "router_restarts",
    "master_killed",
    "prefill_delay",
    "prefill_cut",
)


def why_not() -> str | None:
    """Return the reason why this machine cannot run the fleet, or None."""
    if importlib.util.find_spec("dynamo") is None:
        return "Dynamo is not installed"
    if not mooncake_master.is_installed():
        return "Mooncake is not installed"
    return network.why_not()


def table(rows: Iterable[dict]) -> str:
    """Return rows as a Markdown table."""
    lines = [
        "| fault | hit rate before, during, after | index correct after | hit rate back after | "
        "requests | longest answer | wrong, lost, leaking |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        rates = (row[f"hit_rate_{when}"] for when in ("before", "during", "after"))
        shown = ", ".join("-" if each is None else f"{100 * each:.0f} %" for each in rates)
        index = row["index_recovered_s"]
        lines.append(
            f"| {row['scenario']} | {shown} | {'-' if index is None else f'{index:.1f} s'} | "
            f"{row['hits_recovered_s']:.1f} s | {row['requests']} | {row['longest_answer_s']:.1f} s | "
            f"{row['wrong']}, {row['lost']}, {len(row['leaks'])} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds per phase")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scenarios", nargs="*", default=SCENARIOS, choices=SCENARIOS)
    parser.add_argument("--no-store", action="store_true", help="run the replicas without a store")
    add_json(parser)
    options = parser.parse_args()
    if reason := why_not():
        print(f"SKIPPED: {reason}")
        return 0
    torch.set_num_threads(1)
    has_store = not options.no_store
    with Fleet(options.replicas, options.seconds, options.seed, has_store=has_store) as fleet:
        for name in options.scenarios:
            if name == "master_killed" and not has_store:
                continue
            print(json.dumps(getattr(fleet, name)()), file=sys.stderr, flush=True)
    rows = fleet.rows
    print(table(rows))
    found = {"replicas": options.replicas, "seconds": options.seconds, "seed": options.seed}
    found |= {"store": has_store, "delay and loss": asdict(BAD), "scenarios": rows}
    save(options.json, "fleet faults" + ("" if has_store else ", no store"), found)
    is_good = all(
        not (row["wrong"] or row["lost"] or row["leaks"] or row["index_differs"]) for row in rows
    )
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
