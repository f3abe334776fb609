# SPDX-License-Identifier: Apache-2.0
"""The hit of an identical prompt ends where the manager says, under all options that move this end.

Each random case draws groups, options and a prompt, sends the prompt in steps that end where
`checkpoint_tokens` says, and sends it again. The second hit must end at `promised_end`, which is
computed here by trying all lengths. In between, other prompts share a part of the prompt, the
request is preempted, generates tokens with drafts, or moves to the host and back. Simulated pages
check that every token reads the content of its own prefix.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field, replace
from math import gcd, lcm

import numpy as np
import pytest

from kvcache import Admit, ContextParallel, GroupSpec, KVCacheManager, Request, Status, StepReport
from kvcache.allocator import check_invariants
from kvcache.native.load import core

CASES_PER_SEED = 200
NUM_BLOCKS = 4_000


@dataclass
class Case:
    """A manager's options and a prompt."""

    groups: list[GroupSpec]
    world_size: int
    options: dict
    num_lookahead: int
    num_tokens: int
    chunk_tokens: int
    is_direct: bool = False  # served by `admit` and `extend` instead of steps
    num_drafts: int = 0
    checks_contents: bool = True
    sizes: list[int] = field(init=False)

    def __post_init__(self) -> None:
        cp = ContextParallel(dcp_world_size=self.world_size)
        self.sizes = [group.tokens_per_block(cp) for group in self.groups]

    @property
    def hash_size(self) -> int:
        return self.options.get("hash_block_size") or gcd(*self.sizes)

    def grain(self, g: int) -> int:
        """Return the number of tokens between the ends at which the group can be hit."""
        is_whole = self.is_direct and any(
            group.kind == "recurrent" or not group.cached for group in self.groups
        )
        if self.options.get("hash_block_size") is None or is_whole:
            return self.sizes[g]
        return self.hash_size

    def promised_end(self, num_tokens: int | None = None) -> int:
        """Return the end of the longest hit of a prompt of which everything is cached."""
        num_tokens = self.num_tokens if num_tokens is None else num_tokens
        num_hashed = max(num_tokens - self.num_lookahead, 0) // self.hash_size * self.hash_size
        cached = [g for g, group in enumerate(self.groups) if group.cached]
        if not cached:
            return 0
        if self.is_direct:  # ids are passed for whole blocks of all groups
            cached_unit = lcm(*(self.grain(g) for g in range(len(self.groups))))
        else:
            cached_unit = lcm(*(self.grain(g) for g in cached))

        def is_found(end: int) -> bool:
            redone = [self.grain(g) for g in cached if self.groups[g].drafts]
            return end + max(redone, default=0) <= num_hashed

        ends = range(cached_unit, num_tokens, cached_unit)
        return max((end for end in ends if is_found(end)), default=0)

    def request(self, name: str, tokens: list[int]) -> tuple[Request, core.HashedTokens | None]:
        """Return a request and, if the engine computes the hashes, its hashes."""
        if not self.num_lookahead:
            return Request(name, tokens), None
        hashed = core.HashedTokens(self.hash_size, bytes(32), "sha256_cbor", self.num_lookahead)
        hashed.extend_to(tokens)
        return Request(name, tokens, block_hashes=hashed), hashed


def draw(rng: random.Random) -> Case:
    """Return a random case."""
    world_size = rng.choice([1, 1, 1, 2, 4])
    base = rng.choice([2, 4, 6])
    groups = []
    for _ in range(rng.choice([1, 2, 2, 3, 3, 4])):
        size = base * rng.choice([1, 1, 2, 3, 4])
        kind = rng.choice(
            ["full_attention"] * 2 + ["sliding_window"] * 2 + ["recurrent"] * 2 + ["chunked_local"]
        )
        options = {}
        if kind == "sliding_window":
            options = {"window": rng.choice([1, 2, 5, base * 2 + 1, base * 5, 200])}
        elif kind == "chunked_local":
            options = {"chunk_size": rng.choice([3, base, base * 4, 64])}
        elif num_drafts := rng.choice([0, 0, 1, 3]):
            options = {"num_speculative_blocks": num_drafts} if kind == "recurrent" else {}
        is_state = kind == "recurrent"
        groups.append(
            GroupSpec(
                kind,
                size,
                options,
                replicated=is_state or rng.random() < 0.2,
                cached=is_state or rng.random() < 0.85,
                drafts=not is_state and rng.random() < 0.25,
            )
        )
    case = Case(groups, world_size, {}, rng.choice([0, 0, 1, 2, 3]), 1, 1)
    if rng.random() < 0.6:
        common = gcd(*case.sizes)
        case.options["hash_block_size"] = rng.choice(
            [d for d in range(1, common + 1) if common % d == 0 and (d > 1 or common < 4)]
        )
    sparse = [g for g in groups if g.cached and g.kind in ("recurrent", "sliding_window")]
    unit = lcm(*(case.grain(g) for g, group in enumerate(groups) if group.cached), 1)
    if sparse and rng.random() < 0.6:
        case.options["retention_interval"] = unit * rng.choice([0, 0, 1, 2, 5])
    if case.num_lookahead:
        case.options |= {
            "hash_algorithm": "engine:x",
            "num_hash_lookahead_tokens": case.num_lookahead,
        }
    case.options["num_preallocate_tokens"] = rng.choice([0, 0, 16])
    if rng.random() < 0.25:
        case.options["num_host_blocks"] = NUM_BLOCKS
    near = unit * rng.randint(1, 4) + rng.randint(-1, 4)
    case.num_tokens = max(rng.choice([near, rng.randint(1, 100), rng.randint(1, 300)]), 1)
    case.chunk_tokens = rng.choice([1, 7, unit, 2 * unit + 1, 40, 1_000, 1_000])
    states = [g.options.get("num_speculative_blocks", 0) for g in groups if g.kind == "recurrent"]
    case.num_drafts = min(states, default=rng.choice([0, 2]))
    return case


class Sender:
    """Sends prompts to a manager, as a scheduler with chunked prefill does."""

    def __init__(self, case: Case, rng: random.Random) -> None:
        self.case, self.rng = case, rng
        self.manager = KVCacheManager.for_groups(
            case.groups,
            NUM_BLOCKS,
            2_000,
            context_parallel=ContextParallel(dcp_world_size=case.world_size),
            **case.options,
        )
        self.num_sent = 0

    def step(self, *args, **options):
        plan = self.manager.step(*args, **options)
        if self.manager.options.num_host_blocks:
            self.manager.report(StepReport(plan.step_id, completed=True))
        return plan

    def send(self, tokens: list[int]) -> int:
        """Compute the prompt, generate some tokens, and return the number of hit tokens."""
        case, manager, rng = self.case, self.manager, self.rng
        self.num_sent += 1
        later = [*tokens, *(rng.randrange(1_000, 2_000) for _ in range(24))]
        request, hashed = case.request(f"r{self.num_sent}", tokens)
        count = manager.checkpoint_tokens(request, case.chunk_tokens)
        plan = self.step(new=[Admit(request, count)])
        assert plan.status.tolist() == [Status.SERVED]
        hit = int(plan.num_computed_tokens[0])
        while (done := manager.num_computed_tokens(request)) < len(tokens):
            count = manager.checkpoint_tokens(request, case.chunk_tokens)
            assert 0 < count <= case.chunk_tokens
            row = manager.row(request)
            if manager.options.num_host_blocks and rng.random() < 0.1:
                self.step(swap_out=[row])
            assert self.step([row], [count]).status.tolist() == [Status.SERVED]
            assert manager.num_computed_tokens(request) == done + count
        for at in range(len(tokens), len(tokens) + rng.choice([0, 0, 3, 20])):
            if hashed is not None:
                hashed.extend_to(later[: at + 1])
            self.step([manager.row(request)], [1], token_ids=[later[at]])
        manager.free(request)
        return hit


def check(seed: int, number: int) -> None:
    rng = random.Random(f"hit ends {seed} {number}")
    case = draw(rng)
    sender = Sender(case, rng)
    tokens = [rng.randrange(1_000) for _ in range(case.num_tokens)]
    for _ in range(rng.choice([0, 0, 1])):
        num_shared = rng.randint(0, case.num_tokens)
        sender.send([*tokens[:num_shared], *(rng.randrange(1_000) for _ in range(rng.randint(1, 40)))])
    sender.send(tokens)
    hit = sender.send(tokens)
    check_invariants(sender.manager)
    assert hit == case.promised_end(), f"seed {seed}, case {number}: {case}"


@pytest.mark.parametrize("seed", range(3))
def test_an_identical_prompt_hits_where_the_manager_says(seed):
    for number in range(CASES_PER_SEED):
        check(seed, number)
