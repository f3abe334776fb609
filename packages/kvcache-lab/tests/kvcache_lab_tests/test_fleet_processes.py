# SPDX-License-Identifier: Apache-2.0
"""Compares a simulated fleet to real engines: `kvcache serve` processes behind a router that uses
Dynamo's index.

The simulated fleet must choose the same replica and find the same hits for each request.
"""

import contextlib
import json
import random
import re
import subprocess
import sys
import time
import urllib.request

import numpy as np
import pytest

pytest.importorskip("zmq")
pytest.importorskip("transformers")

from kvcache_lab import WorkloadRequest
from kvcache_lab.content import prefix_keys
from kvcache_lab.fleet import ROUTERS, Fleet, Hardware, simulate_fleet
from kvcache_lab.fleet.routers import PrefixAware, RoundRobin
from tests.machinery.dynamo_indexer import Indexer, needs_dynamo
from tests.machinery.ports import free_port

BLOCK, SERVERS = 16, 3


class Server:
    """A `kvcache serve` process with a tiny model."""

    def __init__(self, number, indexer):
        self.number = number
        events, replays = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        command = [sys.executable, "-m", "kvcache", "serve", "llama", "--port", "0"]
        command += ["--block-size", str(BLOCK), "--budget", "1280KiB", "--max-model-len", "512"]
        command += ["--events", events, "--events-replay", replays]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.endpoints, self.indexer = (events, replays), indexer

    def wait(self):
        lines = []
        while not (found := re.search(r"http://\S+/v1", lines[-1] if lines else "")):
            lines.append(self.process.stderr.readline())
            assert lines[-1], f"the server ended: {''.join(lines)}"
        self.url = found[0]
        self.indexer.register(self.number, *self.endpoints)

    def complete(self, tokens):
        """Generate one token for a prompt. Return the number of cached tokens."""
        body = {"model": "llama", "prompt": tokens, "max_tokens": 1}
        request = urllib.request.Request(
            f"{self.url}/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["usage"]["prompt_tokens_details"]["cached_tokens"]

    def num_blocks(self):
        """Return the size of the pool, including the null block."""
        with urllib.request.urlopen(self.url.removesuffix("v1") + "metrics", timeout=10) as answer:
            text = answer.read().decode()
        return 1 + int(float(re.search(r"^kvcache_blocks\{.*\} (\S+)", text, re.MULTILINE)[1]))

    def close(self):
        self.process.terminate()
        self.process.wait(30)


class FirstInTurn(PrefixAware):
    """Spreads the first turns of chats evenly over the replicas, which are idle at each arrival."""

    def __init__(self, first):
        self._first, self._next = first, RoundRobin()

    def choose(self, replicas, item, request, session):
        """Return the next replica for a first turn, and otherwise the replica with the longest
        prefix.
        """
        if self._first[item.index]:
            return self._next.choose(replicas, item, request, session)
        costs = [each.first_token_ms(item.arrival_ms, item, request) for each in replicas]
        return costs.index(min(costs))  # like this test's router, ignore the load


def chats(rng, num_requests):
    """Return the prompts of interleaved chats' turns, and for each, whether it is the first turn of
    its chat.
    """
    system = [rng.randrange(3, 512) for _ in range(40)]
    chats = [[] for _ in range(8)]
    prompts, first = [], []
    for _ in range(num_requests):
        which = rng.randrange(len(chats))
        first.append(len(chats[which]) > 300 or not chats[which])
        if first[-1]:
            chats[which] = [*system]
        chats[which] = chats[which] + [rng.randrange(3, 512) for _ in range(rng.randrange(5, 60))]
        prompts.append(chats[which])
    return prompts, first


@needs_dynamo
def test_a_plan_finds_the_hits_of_real_engines_behind_a_real_router(tmp_path, monkeypatch):
    rng, answered, following = random.Random(3), [], 0
    prompts, first = chats(rng, 200)
    with contextlib.ExitStack() as stack:
        indexer = Indexer(tmp_path)
        stack.callback(indexer.close)
        servers = [Server(number, indexer) for number in range(SERVERS)]
        for each in servers:
            stack.callback(each.close)
        for each in servers:
            each.wait()
        num_blocks = {each.num_blocks() for each in servers}
        time.sleep(0.5)  # wait until all sockets are connected
        for tokens, is_first in zip(prompts, first):
            if is_first:
                chosen, following = following, (following + 1) % SERVERS
            else:
                scores = indexer.scores(tokens)
                chosen = max(range(SERVERS), key=lambda number: (scores.get(number, 0), -number))
            answered.append((chosen, servers[chosen].complete(tokens)))
            time.sleep(0.05)  # wait until the indexer has received the events
    tokens = [np.array(each, np.int32) for each in prompts]
    workload = [
        WorkloadRequest(i, 10_000 * i, each, 1, prefix_keys(each)) for i, each in enumerate(tokens)
    ]
    planned = []
    monkeypatch.setitem(ROUTERS, "first in turn", lambda: FirstInTurn(first))
    fleet = Fleet(
        **{"replicas": SERVERS, "num_blocks": num_blocks.pop(), "block_size": BLOCK},
        **{"router": "first in turn", "num_preallocate_tokens": 64},
    )
    report = simulate_fleet(
        *(lambda: workload, fleet, Hardware()),
        on_request=lambda item, replica, served: planned.append((replica, served.num_hit)),
    )
    assert planned == answered
    assert report.token_hit_rate > 0.3 and len({replica for replica, _ in planned}) == 3
