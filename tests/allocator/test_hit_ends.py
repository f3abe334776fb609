# SPDX-License-Identifier: Apache-2.0
"""The hit of an identical prompt ends where the manager says, under all options that move this end.

Each random case draws groups, options and a prompt, sends the prompt in steps that end where
`checkpoint_tokens` says, and sends it again. The second hit must end at `promised_end`, which is
computed here by trying all lengths. In between, other prompts share a part of the prompt, the
request is preempted, generates tokens with drafts, or moves to the host and back. What pages contain
is checked by the simulator (`tests/simulator`).
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import gcd, lcm

import pytest

from kvcache import (
    Admit,
    ContextParallel,
    GroupSpec,
    KVCacheManager,
    Request,
    Status,
    StepPlan,
    StepReport,
)
from kvcache.allocator import check_invariants
from kvcache.native.load import core
from tests.machinery.shared import manager_of, sampled

SERIES = os.environ.get("KVCACHE_TEST_SEED", "")
NUM_CASES, CASES_PER_SEED = 12_000, 200  # `make test` runs two seeds


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
    num_drafts: int = 0  # per decode step
    num_blocks: int = 4_000
    sizes: list[int] = field(init=False)

    def __post_init__(self) -> None:
        cp = ContextParallel(dcp_world_size=self.world_size)
        self.sizes = [group.tokens_per_block(cp) for group in self.groups]

    @property
    def hash_size(self) -> int:
        return self.options.get("hash_block_size") or gcd(*self.sizes)

    @property
    def has_states(self) -> bool:
        return any(group.kind == "recurrent" for group in self.groups)

    @property
    def with_partial(self) -> bool:
        """Whether hits may end inside blocks; outside of steps only if nothing else is needed."""
        return not self.is_direct or not (
            self.has_states or any(not group.cached for group in self.groups)
        )

    def ends(self, num_tokens: int, num_equal: int, with_partial: bool) -> list[int]:
        """Return where a prompt can hit another one of which everything is cached.

        The first `num_equal` of its tokens are equal.
        """
        cached = [g for g, group in enumerate(self.groups) if group.cached]
        if not cached:
            return [0]
        grains = list(self.sizes)
        if with_partial and self.options.get("hash_block_size"):
            grains = [self.hash_size for _ in grains]
        unit = lcm(*(grains[g] for g in cached) if with_partial else grains)
        redone = max((grains[g] for g in cached if self.groups[g].drafts), default=0)
        num_hashed = max(num_equal - self.num_lookahead, 0) // self.hash_size * self.hash_size
        return [0, *(n for n in range(unit, num_tokens, unit) if n + redone <= num_hashed)]

    @property
    def promised_end(self) -> int:
        """The end of the longest hit of the prompt if it was sent before."""
        return self.ends(self.num_tokens, self.num_tokens, self.with_partial)[-1]

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
    case.is_direct = rng.random() < 0.2
    if rng.random() < 0.6:
        common = gcd(*case.sizes)
        case.options["hash_block_size"] = rng.choice(
            [d for d in range(1, common + 1) if common % d == 0 and (d > 1 or common < 4)]
        )
    sparse = [g for g in groups if g.cached and g.kind in ("recurrent", "sliding_window")]
    grains = [case.options.get("hash_block_size") or size for size in case.sizes]
    unit = lcm(*(grain for grain, group in zip(grains, groups) if group.cached), 1)
    if sparse and rng.random() < 0.6:
        case.options["retention_interval"] = unit * rng.choice([0, 0, 1, 2, 5])
    if case.num_lookahead:
        case.options |= {
            "hash_algorithm": "engine:x",
            "num_hash_lookahead_tokens": case.num_lookahead,
        }
    case.options["num_preallocate_tokens"] = rng.choice([0, 0, 16])
    if case.is_direct:
        case.options["engine_copies_states"] = True
        if "hash_block_size" in case.options:  # not with states of drafts
            groups[:] = [replace(g, options={}) if g.kind == "recurrent" else g for g in groups]
    elif rng.random() < 0.25:
        case.options["num_host_blocks"] = 20_000
    near = unit * rng.randint(1, 4) + rng.randint(-1, 4)
    case.num_tokens = max(rng.choice([near, rng.randint(1, 100), rng.randint(1, 300)]), 1)
    if "num_host_blocks" in case.options:  # a small pool, from which blocks move to the host
        case.num_blocks = 2 * sum(-(-(case.num_tokens + 80) // size) + 12 for size in case.sizes)
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
            case.num_blocks,
            2_000,
            context_parallel=ContextParallel(dcp_world_size=case.world_size),
            **case.options,
        )
        self.num_sent = 0

    def step(self, *args, **options) -> StepPlan:
        plan = self.manager.step(*args, **options)
        assert (plan.status == Status.SERVED).all()
        if self.manager.options.num_host_blocks or self.case.is_direct:
            self.manager.report(StepReport(plan.step_id, completed=True))
        return plan

    def admit(self, request: Request, count: int, num_prompt: int) -> int:
        """Admit a request, and return the number of hit tokens."""
        if not self.case.is_direct:
            plan = self.step(new=[Admit(request, count, num_prompt_tokens=num_prompt)])
            return int(plan.num_computed_tokens[0])
        found = self.manager.cache.find_prefix(request)
        ask = Admit(
            request, count, num_prompt_tokens=num_prompt, num_shared_tokens=found.num_shared_tokens
        )
        assert self.manager.admit(ask, found.block_ids) is not None
        self.manager.take_copies()
        return found.num_tokens

    def prefill(self, request: Request, num_prompt: int, stop: int) -> int:
        """Compute the known tokens up to `stop`, and return the number of hit tokens."""
        manager, chunk = self.manager, self.case.chunk_tokens
        hit = self.admit(request, manager.checkpoint_tokens(request, chunk), num_prompt)
        while (done := manager.num_computed_tokens(request)) < stop:
            count = manager.checkpoint_tokens(request, chunk)
            assert 0 < count <= chunk
            if self.case.is_direct:
                self.step()
                assert manager.extend(request, count) is not None
            else:
                row = manager.row(request)
                if manager.options.num_host_blocks and self.rng.random() < 0.1:
                    self.step(swap_out=[row])
                self.step([row], [count])
            assert manager.num_computed_tokens(request) == done + count
        return hit

    def decode(self, request: Request, hashed: core.HashedTokens | None, tokens: list[int]) -> None:
        """Generate the tokens after the request's known tokens, with drafts."""
        manager, case = self.manager, self.case
        num_rejected = 0
        while request.num_tokens < len(tokens):
            # The drafts that were accepted, and the sampled token.
            num_new = manager.num_computed_tokens(request) - num_rejected + 1 - request.num_tokens
            ids = tokens[request.num_tokens : request.num_tokens + num_new]
            if hashed is not None:
                hashed.extend_to(tokens[: request.num_tokens + num_new])
            if case.is_direct:
                request.append_tokens(ids)
                self.step()
                assert manager.extend(request, 1) is not None
                continue
            num_drafts = min(case.num_drafts, len(tokens) - request.num_tokens - len(ids))
            self.step(
                [manager.row(request)],
                [1 + num_drafts],
                token_ids=ids,
                num_token_ids=[len(ids)],
                num_rejected_tokens=[num_rejected],
            )
            num_rejected = self.rng.randint(0, num_drafts)
            if num_drafts == 0 and request.num_tokens == len(tokens):
                break

    def fill_pool(self, other: Callable) -> None:
        """Evict everything from the device: admit requests until no block is free, then free them."""
        held: list[Request] = []
        while True:
            request, _ = self.case.request(f"held{len(held)}", other(0))
            plan = self.manager.step(new=[request])
            self.manager.report(StepReport(plan.step_id, completed=True))
            if plan.status[0] != Status.SERVED:
                break
            held.append(request)
        for request in held:
            self.manager.free(request)

    def send(self, tokens: list[int]) -> int:
        """Send a prompt, generate some tokens, and return the number of hit tokens."""
        case, manager, rng = self.case, self.manager, self.rng
        self.num_sent += 1
        known = [*tokens, *(rng.randrange(1_000, 2_000) for _ in range(rng.choice([0, 0, 3, 20])))]
        request, hashed = case.request(f"r{self.num_sent}", tokens)
        stop = rng.randint(1, len(tokens)) if rng.random() < 0.2 else len(tokens)
        hit = self.prefill(request, len(tokens), stop)
        if stop < len(tokens):  # preempted
            manager.free(request)
            self.prefill(request, len(tokens), len(tokens))
        self.decode(request, hashed, known)
        if request.num_tokens > len(tokens) and rng.random() < 0.3:  # preempted
            manager.free(request)
            self.prefill(request, len(tokens), request.num_tokens)
        manager.free(request)
        return hit


def check(seed: int, number: int) -> None:
    rng = random.Random(f"{SERIES} {seed} {number}")
    case = draw(rng)
    sender = Sender(case, rng)
    tokens = [rng.randrange(1_000) for _ in range(case.num_tokens)]

    def other(num_equal: int) -> list[int]:
        """Return another prompt that begins with this number of equal tokens."""
        more = [rng.randrange(2_000, 3_000) for _ in range(rng.randint(1, 40))]
        return tokens[:num_equal] + more

    for _ in range(rng.choice([0, 0, 1])):
        sender.send(other(rng.randint(0, case.num_tokens)))
    first_hit = sender.send(tokens)
    assert sender.send(tokens) == case.promised_end
    # Other groups may read nothing at the end of a hit: a window of 1, the start of a chunk.
    reads_any = any(
        group.cached and (group.kind == "full_attention" or group.options.get("window", 1) > 1)
        for group in case.groups
    )
    if reads_any and not case.has_states:
        # Windows are cached for hits of whole blocks, too, unless the prompt had a longer hit.
        request, _ = case.request("whole", tokens)
        found = sender.manager.cache.find_prefix(request, whole_blocks=True).num_tokens
        end = case.ends(case.num_tokens, case.num_tokens, with_partial=False)[-1]
        assert found == end or first_hit > end
        check_part(case, sender, other, rng.randint(0, case.num_tokens))
    if sender.manager.host_pool and "hash_block_size" not in case.options:
        sender.fill_pool(other)
        assert sender.send(tokens) == case.promised_end
    check_invariants(sender.manager)


def check_part(case: Case, sender: Sender, other: Callable, num_equal: int) -> None:
    """Check the hit of a prompt that equals only a part of the prompt that was sent."""
    prompt = other(num_equal)
    ends = case.ends(len(prompt), num_equal, case.with_partial)
    most, interval = ends[-1], case.options.get("retention_interval")
    if interval is not None:
        ends = [n for n in ends if n == case.promised_end or (interval and n % interval == 0)]
    assert max(ends, default=0) <= sender.send(prompt) <= most


@pytest.mark.parametrize("seed", sampled(range(1, 1 + NUM_CASES // CASES_PER_SEED), 2))
def test_an_identical_prompt_hits_where_the_manager_says(seed):
    for number in range(CASES_PER_SEED):
        try:
            check(seed, number)
        except Exception as error:
            raise AssertionError(f"seed {SERIES!r} {seed}, case {number}") from error


class TestAdmit:
    """`admit` accepts every prefix that `find_prefix` finds inside a block."""

    @pytest.mark.parametrize(
        "group",
        [
            GroupSpec("sliding_window", 8, {"window": 1}),
            GroupSpec("chunked_local", 8, {"chunk_size": 2}),
        ],
    )
    def test_a_prefix_whose_last_block_is_not_read(self, group):
        manager = manager_of(group, hash_block_size=2)
        manager.step(new=[Request("a", range(15))])
        request = Request("b", range(15))
        found = manager.cache.find_prefix(request)
        assert (found.block_ids.tolist(), found.num_tokens) == ([0, 0], 14)
        assert len(manager.admit(request, found.block_ids)) == 1
        assert manager.take_copies().tolist() == []
        assert manager.num_computed_tokens(request) == 15

    def test_a_prefix_found_for_a_request_that_does_not_read_the_cache_by_default(self):
        manager = manager_of(GroupSpec("full_attention", 8), hash_block_size=2)
        manager.step(new=[Request("a", range(15))])
        request = Request("b", range(15), read_cache=False)
        found = manager.cache.find_prefix(request, read_cache=True)
        assert found.num_tokens == 14
        assert manager.admit(Admit(request, read_cache=True), found.block_ids) is not None

    def test_a_prefix_with_too_few_groups_is_rejected(self):
        manager = manager_of(*[GroupSpec("full_attention", 8)] * 2, hash_block_size=2)
        manager.step(new=[Request("a", range(15))])
        request = Request("b", range(15))
        found = manager.cache.find_prefix(request)
        with pytest.raises(ValueError, match="computed_blocks has 1 groups: expected 2"):
            manager.admit(request, found.block_ids[:1])


@pytest.mark.parametrize("other", [
    GroupSpec("chunked_local", 4, {"chunk_size": 8}),
    GroupSpec("sliding_window", 4, {"window": 8}, cached=False),
])  # fmt: skip
def test_a_retention_interval_without_windows_and_states_is_rejected(other):
    message = "retention_interval is 16: expected None, because no cached group has sliding"
    with pytest.raises(ValueError, match=message):
        manager_of(GroupSpec("full_attention", 4), other, retention_interval=16)
