# SPDX-License-Identifier: Apache-2.0
"""Short calls for tests of managers: they admit and serve requests, and return what tests compare."""

from __future__ import annotations

from kvcache import Admit, GroupSpec, KVCacheManager, Request, Status, StepPlan

FULL = GroupSpec("full_attention", 4)
WINDOW = GroupSpec("sliding_window", 4, {"window": 6})
STATE = GroupSpec("recurrent", 4)
ENCODER = GroupSpec("cross_attention", 4)
OF_REQUEST = ("lora", "mm_items", "cache_salt", "session", "prompt_embeds", "block_hashes")
OF_REQUEST += ("num_encoder_tokens", "read_cache", "write_cache")


def new(
    manager: KVCacheManager, name: str, tokens, num_tokens: int | None = None, **ask
) -> Request:
    """Admit a request by `step`, and return it. A number stands for the tokens below it.

    Other arguments are those of `Request` or of `Admit`.
    """
    of_request = {key: ask.pop(key) for key in [*ask] if key in OF_REQUEST}
    tokens = range(tokens) if isinstance(tokens, int) else tokens
    request = Request(name, tokens, **of_request)
    assert manager.step(new=[Admit(request, num_tokens, **ask)]).status[0] == Status.SERVED
    return request


def go(manager: KVCacheManager, request: Request, *counts: int, **options) -> StepPlan:
    """Serve numbers of tokens of a request, one step each, and return the last plan."""
    for count in counts:
        plan = manager.step([manager.row(request)], [count], **options)
        assert plan.status[0] == Status.SERVED
    return plan


def hit(manager: KVCacheManager, tokens, **options) -> int:
    """Return how many leading tokens a prompt with these tokens would hit on the device."""
    tokens = range(tokens) if isinstance(tokens, int) else tokens
    return manager.cache.find_prefix(Request("probe", tokens), **options).num_tokens


def ids(manager: KVCacheManager, request: Request, group: int = 0) -> list[int]:
    return manager.block_ids(request, group).tolist()
