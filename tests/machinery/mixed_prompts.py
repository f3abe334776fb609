# SPDX-License-Identifier: Apache-2.0
"""Workloads that keep changing, on which a policy that learns can lose hits to LRU."""

from __future__ import annotations

import itertools
import random

import numpy as np

from kvcache_lab import WorkloadRequest
from kvcache_lab.traces.block_ids import request_of_ids

BLOCK_SIZE = 16


def mixed_prompts(seed: int, num_requests: int) -> list[WorkloadRequest]:
    """Return requests whose workload changes at random: loops over documents, conversations,
    prompts that never recur, prompts that share parts of their prefixes, and prompts that recur
    after a fixed number of others.
    """
    rng = random.Random(seed)
    ids = itertools.count(1)
    found: list[WorkloadRequest] = []
    time = 0.0

    def fresh(most: int) -> list[int]:
        return [next(ids) for _ in range(rng.randint(1, most))]

    def serve(blocks: list[int], num_output_tokens: int = 1) -> None:
        nonlocal time
        time += pause * rng.random()
        chain = np.array(blocks, np.int64)
        request = request_of_ids(
            len(found), int(time), len(blocks) * BLOCK_SIZE, num_output_tokens, chain, BLOCK_SIZE
        )
        found.append(request)

    while len(found) < num_requests:
        pause = rng.choice([1, 10, 1_000, 20_000, 200_000])  # ms
        num = rng.randrange(20, num_requests // 4)
        kind = rng.choice(["loop", "chats", "scan", "tree", "delayed", "burst", "continued"])
        if kind == "loop":
            documents = [fresh(7) for _ in range(rng.randrange(2, 60))]
            for i in range(num):
                if rng.random() < 0.03:
                    documents[rng.randrange(len(documents))] = fresh(7)
                serve(documents[i % len(documents)] + (fresh(1) if rng.random() < 0.5 else []))
        elif kind == "chats":
            chats = [fresh(10)]
            for _ in range(num):
                if rng.random() < 0.3:
                    chats.append(fresh(10))
                at = rng.randrange(max(len(chats) - rng.choice([2, 10, 50]), 0), len(chats))
                chats[at] = chats[at] + fresh(3) if len(chats[at]) < 40 else chats[at][:5]
                serve(chats[at], rng.randrange(1, 2_000))
        elif kind == "scan":
            for _ in range(num // 4):
                serve(fresh(29))
        elif kind == "tree":
            branches = [fresh(9)]
            for _ in range(num):
                chain = rng.choice(branches)
                branches.append((chain[: rng.randint(1, len(chain))] + fresh(4))[:30])
                branches = branches[-rng.choice([5, 30, 100]) :]
                serve(branches[-1])
        elif kind == "delayed":
            before, delay = [], rng.randrange(1, 40)
            for _ in range(num):
                before.append(fresh(3))
                serve(before[-1])
                if len(before) > delay and rng.random() < 0.9:
                    serve(before[-delay - 1])
        elif kind == "burst":
            chain = fresh(19)
            for _ in range(num):
                chain = fresh(19) if rng.random() < 0.1 else chain
                serve(chain)
        else:  # at first no prompt is continued, then every prompt is
            waiting: list[list[int]] = []
            for i in range(num):
                chain = fresh(5)
                serve(chain)
                if i > num // 2:
                    waiting.append(chain)
                if len(waiting) > 10:
                    serve(waiting.pop(0) + fresh(1))
    return found[:num_requests]
