# SPDX-License-Identifier: Apache-2.0
"""Compares kvcache's manager with vLLM's own at startup, on the model's groups in a small pool.

Both managers serve the same random requests without a model. Some requests grow beyond the model's
windows, and some receive their first tokens from an external source such as a connector. If all
groups have full attention, blocks are also evicted; with windows or states, nothing is evicted,
because the managers evict in different orders (docs/vllm.md). Hits, new blocks and pool usage must be
identical in each step.
"""

from __future__ import annotations

import dataclasses
import inspect
import random
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from vllm import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
)
from vllm.v1.request import Request, RequestStatus

from kvcache_vllm.hashing import get_request_block_hasher

_Pair = tuple[Request, Request]
_Scheduled = tuple[_Pair, int]  # a pair of requests and its number of tokens in the step
NUM_STEPS = 50
_MOST_RUNNING = 4
_MOST_PROMPT_TOKENS = 5120
_MOST_TOKENS_AFTER_A_PROMPT = 16
_NUM_ENCODER_TOKENS = 10


class StartupComparison(NamedTuple):
    """The extent of the comparison at startup."""

    num_steps: int
    num_requests: int
    num_hit_tokens: int
    seconds: float


class DecisionsDiffer(ValueError):
    """Raised if the managers differ in hits or blocks.

    The message describes the first difference.
    """


def compare_managers(
    own: Callable[..., Any],
    ours: Callable[..., Any],
    arguments: Mapping[str, Any],
    hash_algorithm: str,
) -> StartupComparison:
    """Run the same requests in vLLM's manager and in kvcache's.

    Args:
        own: vLLM's manager class.
        ours: kvcache's manager class.
        arguments: The arguments that vLLM's scheduler passes to the manager class.
        hash_algorithm: vLLM's `prefix_caching_hash_algo`.

    Raises:
        DecisionsDiffer: The managers make different decisions.
        ValueError: A manager fails.
    """
    started = time.perf_counter()
    seed = getattr(kv_cache_utils, "NONE_HASH", None)
    hash_function = get_hash_fn_by_name(hash_algorithm)
    try:
        kv_cache_utils.init_none_hash(hash_function)
        sides = _Sides(own, ours, arguments, hash_function)
        try:
            for _ in range(NUM_STEPS):
                sides.step()
            sides.end()
        except DecisionsDiffer:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            own_file = inspect.getsourcefile(own)
            if any(each.filename == own_file for each in traceback.extract_tb(error.__traceback__)):
                raise ValueError(
                    f"vLLM's own manager fails with this model and configuration ({what})"
                ) from error
            raise ValueError(
                f"kvcache's manager fails at startup ({what}); serve with vLLM's own scheduler, and "
                "report the model and the versions of both"
            ) from error
    finally:
        if seed is not None:
            kv_cache_utils.NONE_HASH = seed
    seconds = time.perf_counter() - started
    return StartupComparison(NUM_STEPS, sides.num_requests, sides.num_hit_tokens, seconds)


class _Sides:
    """vLLM's manager and kvcache's manager, each with a separate copy of every request."""

    def __init__(
        self,
        own: Callable[..., Any],
        ours: Callable[..., Any],
        arguments: Mapping[str, Any],
        hash_function: Callable,
    ) -> None:
        self._rng = random.Random(0)
        config: KVCacheConfig = arguments["kv_cache_config"]
        specs = [group.kv_cache_spec for group in config.kv_cache_groups]
        self._unit = arguments["scheduler_block_size"]
        self._has_encoder = any(isinstance(each, CrossAttentionSpec) for each in specs)
        # kvcache and vLLM publish a state in different steps, so requests with states run one at a
        # time, in chunks of one block.
        self._has_states = any(isinstance(each, MambaSpec) for each in specs)
        self._most_running = 1 if self._has_states else _MOST_RUNNING
        self._num_lookahead = 0 if self._has_states else 3  # slots for three draft tokens
        windows = [getattr(each, "sliding_window", None) or 0 for each in specs]
        most = max(8 * self._unit + self._unit // 2, max(windows) + 4 * self._unit)
        self._longest = arguments["max_model_len"]
        longest = self._longest - _MOST_TOKENS_AFTER_A_PROMPT
        self._num_prompt_tokens = max(min(most, _MOST_PROMPT_TOKENS, longest), 1)
        small = dataclasses.replace(config, num_blocks=self._num_blocks(specs), kv_cache_tensors=[])
        options = dict(arguments) | {"kv_cache_config": small, "watermark": 0.0}
        options |= {"log_stats": False, "enable_kv_cache_events": False, "metrics_collector": None}
        hashed = arguments["hash_block_size"], hash_function
        lookahead = arguments.get("num_hash_lookahead_tokens", 0)
        more = (lookahead,) if lookahead else ()
        self._managers = own(**options), ours(**options)
        self._hashers = (
            kv_cache_utils.get_request_block_hasher(*hashed, *more),
            get_request_block_hasher(*hashed, lookahead),
        )
        self._heads = [self._tokens(self._num_prompt_tokens) for _ in range(2)]
        self._running: list[_Pair] = []
        self.num_requests = self.num_hit_tokens = self._step = 0

    def _num_blocks(self, specs: list[Any]) -> int:
        """Return a pool size that running requests never exhaust.

        Blocks are evicted from a pool of this size only if all groups have full attention.
        """
        num_tokens = (self._most_running + 2) * (self._num_prompt_tokens + 2 * self._unit)
        if any(not isinstance(each, FullAttentionSpec) for each in specs):
            num_tokens += NUM_STEPS * (3 * self._unit + 2 * _MOST_TOKENS_AFTER_A_PROMPT)
        num_blocks = sum(-(-num_tokens // each.block_size) for each in specs)
        return 2 + num_blocks + 4 * NUM_STEPS * len(specs)

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(1000) for _ in range(count)]

    def step(self) -> None:
        """Simulate one step of the running requests, and admit another request if possible."""
        self._step += 1
        for manager in self._managers:
            manager.new_step_starts()
        scheduled = [self._advance(pair) for pair in self._running]
        if len(self._running) < self._most_running:
            scheduled += self._admit()
        for pair, count in scheduled:  # the scheduler counts the tokens after the step is complete
            self._compute(pair, count)
        usages = [manager.usage for manager in self._managers]
        if abs(usages[0] - usages[1]) > 1e-9:
            raise DecisionsDiffer(
                f"pool usage in step {self._step}: {usages[1]}, vLLM's {usages[0]}"
            )

    def end(self) -> None:
        """Free all requests. Nothing may remain in use."""
        for pair in list(self._running):
            self._free(pair)
        for manager in self._managers:
            if manager.usage > 1e-9:
                raise DecisionsDiffer(f"{manager.usage:.1%} of the pool stays in use")

    def _admit(self) -> list[_Scheduled]:
        rng = self._rng
        head = rng.choice(self._heads)
        most = len(head) if self.num_requests % 4 == 1 else min(len(head), 9 * self._unit)
        tokens = head[: rng.randrange(most) if most < len(head) else most]
        tokens = (tokens + self._tokens(rng.randrange(1, 20)))[: self._num_prompt_tokens]
        pair = tuple(
            Request(
                request_id=f"kvcache-startup-{self.num_requests}",
                prompt_token_ids=list(tokens),
                sampling_params=SamplingParams(max_tokens=16),
                pooling_params=None,
                block_hasher=hasher,
            )
            for hasher in self._hashers
        )
        found = []
        for manager, request in zip(self._managers, pair):
            blocks, num_hit_tokens, boundary = manager.get_computed_blocks(request)
            request.shared_prefix_boundary = boundary
            found.append((num_hit_tokens, blocks))
        hits = [each[0] for each in found]
        self._check("hit tokens", pair, hits)
        encoder = {"num_encoder_tokens": _NUM_ENCODER_TOKENS} if self._has_encoder else {}
        if num_external := self._num_external(pair[0], hits[0]):
            return self._receive(pair, found, num_external)
        count = self._chunk(pair[0], hits[0])
        answers = [
            manager.allocate_slots(
                request,
                count,
                num_new_computed_tokens=hit,
                new_computed_blocks=blocks,
                num_lookahead_tokens=self._num_lookahead,
                **encoder,
            )
            for manager, request, (hit, blocks) in zip(self._managers, pair, found)
        ]
        self._check_blocks(pair, answers)
        return [(pair, count)] if self._started(pair, answers, hits[0]) else []

    def _started(self, pair: _Pair, answers: list[Any], num_computed_tokens: int) -> bool:
        """Count a request, and return whether it has blocks."""
        self.num_requests += 1
        self.num_hit_tokens += num_computed_tokens
        if answers[0] is None:
            return False
        self._running.append(pair)
        for request in pair:
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = num_computed_tokens
        return True

    def _num_external(self, request: Request, num_hit_tokens: int) -> int:
        """Return the number of external tokens: a multiple of the block size, or 0."""
        if self._has_states or self._has_encoder or self.num_requests % 5 != 2:
            return 0
        return (request.num_tokens - 1 - num_hit_tokens) // self._unit * self._unit

    def _receive(self, pair: _Pair, found: list[Any], num_external: int) -> list[_Scheduled]:
        """Admit a request whose external tokens are available immediately, and cache these tokens."""
        answers = [
            manager.allocate_slots(
                request,
                0,
                num_new_computed_tokens=hit,
                new_computed_blocks=blocks,
                num_external_computed_tokens=num_external,
                delay_cache_blocks=True,
            )
            for manager, request, (hit, blocks) in zip(self._managers, pair, found)
        ]
        self._check("success", pair, [answer is not None for answer in answers])
        if self._started(pair, answers, found[0][0]):
            held = [
                manager.get_blocks(request.request_id)
                for manager, request in zip(self._managers, pair)
            ]
            self._check_blocks(pair, held)
            for manager, request in zip(self._managers, pair):
                request.num_computed_tokens += num_external
                manager.cache_blocks(request, request.num_computed_tokens)
        return []

    def _advance(self, pair: _Pair) -> _Scheduled:
        count = self._chunk(pair[0], pair[0].num_computed_tokens)
        answers = [
            manager.allocate_slots(request, count, num_lookahead_tokens=self._num_lookahead)
            for manager, request in zip(self._managers, pair)
        ]
        self._check_blocks(pair, answers)
        return pair, count

    def _chunk(self, request: Request, start: int) -> int:
        """Return the number of tokens in the next step.

        The step ends at a block boundary or at the last token.
        """
        most = 1 if self._has_states else max(self._num_prompt_tokens // (3 * self._unit), 1)
        return min((start // self._unit + most) * self._unit, request.num_tokens) - start

    def _compute(self, pair: _Pair, count: int) -> None:
        token = self._rng.randrange(1000)
        for request in pair:
            request.num_computed_tokens += count
            if request.num_computed_tokens == request.num_tokens:
                request.append_output_token_ids(token)
        has_all = pair[0].num_tokens >= self._longest
        if has_all or pair[0].num_output_tokens >= 2 + self.num_requests % 12:
            self._free(pair)

    def _free(self, pair: _Pair) -> None:
        for manager, request in zip(self._managers, pair):
            manager.free(request)
        self._running.remove(pair)

    def _check_blocks(self, pair: _Pair, answers: list[Any]) -> None:
        counts = [answer and [len(ids) for ids in answer.get_block_ids()] for answer in answers]
        counts = [each if each is None or any(each) else [] for each in counts]
        self._check("new blocks of each group", pair, counts)

    def _check(self, what: str, pair: _Pair, values: list[Any]) -> None:
        if values[0] != values[1]:
            raise DecisionsDiffer(
                f"{what} of a request of {pair[0].num_tokens} tokens in step {self._step}: "
                f"{values[1]}, vLLM's {values[0]}"
            )
