# SPDX-License-Identifier: Apache-2.0
"""The prefix to which a hint refers, with its requests, its hashes and the locations of its
blocks.
"""

from __future__ import annotations

import math

import numpy as np

from kvcache.allocator import KVCacheManager, Request


class HintedPrefix:
    """The part of a request's leading tokens that fills whole blocks.

    For each hint, a separate request, called a guest, holds the prefix. The guest has one token
    more than the prefix, because a prefix hit never includes a request's last token.

    - `num_tokens`: number of tokens in whole blocks of all cached groups.
    - `num_asked_tokens`: number of tokens that the hint refers to, including a partial block.
    - `probe`: a request that is used to look up the prefix. It is never admitted.
    """

    def __init__(self, manager: KVCacheManager, of: Request, num_tokens: int) -> None:
        self._manager, self._of = manager, of
        self.num_asked_tokens = num_tokens
        self._sizes = [
            size for size, group in zip(manager.block_sizes, manager.groups) if group.cached
        ]
        self._step = math.lcm(*self._sizes)
        self.num_tokens = self.whole(min(num_tokens, manager.max_model_len - 1))
        self.probe = self.guest("kv-hint", self.num_tokens)

    def whole(self, num_tokens: int) -> int:
        """Round a number of tokens down to whole blocks."""
        return num_tokens // self._step * self._step

    def guest(self, name: str, num_tokens: int, *, write_cache: bool = False) -> Request:
        """Return a request with `num_tokens` tokens of the prefix and one token after them."""
        of, tokens = self._of, self._of.token_ids[: num_tokens + 1]
        if len(tokens) == num_tokens:
            tokens = np.append(tokens, np.int32(0))
        return Request(
            name,
            tokens,
            lora=of.lora,
            mm_items=of.mm_items,
            cache_salt=of.cache_salt,
            prompt_embeds=of.prompt_embeds,
            prompt_is_token_ids=of.prompt_is_token_ids,
            write_cache=write_cache,
        )

    def num_blocks(self, num_tokens: int) -> int:
        """Return the number of blocks that hold these tokens in all cached groups, ignoring
        windows.
        """
        return sum(num_tokens // size for size in self._sizes)

    def tokens_in(self, num_blocks: int) -> int:
        """Return how many tokens fit into this number of blocks, counted over all cached groups."""
        num_steps = num_blocks // self.num_blocks(self._step)
        return num_steps * self._step

    def hashes(self, num_tokens: int) -> tuple[bytes, ...]:
        """Return the hashes of the first tokens, one per hash block."""
        size = self._manager.cache.hash_block_size
        found = self._manager.cache.hashes(self.probe)[: num_tokens // size]
        return tuple(each.tobytes() for each in found)

    def on_device(self) -> int:
        """Return the number of leading tokens in whole blocks that a request could hit on the device."""
        return self.whole(self._manager.cache.cached_tokens(self.probe).on_device)

    def on_device_or_host(self) -> int:
        """Like `on_device`, but for the device and the host together."""
        return self.whole(self._manager.cache.cached_tokens(self.probe).with_host)
