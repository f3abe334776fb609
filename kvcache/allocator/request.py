"""A request as the prefix cache sees it: tokens, what else its KV depends on, and its hashes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvcache._native import core
from kvcache.allocator.hashing import encode_extra_keys, request_extra_keys, token_array


class Request:
    """One request: its known tokens (prompt, then whatever was generated) and their block hashes.

    `token_ids`: int32[n] or any integers. What else the KV depends on: `lora` (name, path);
    `mm_items`, (identifier, first token, number of tokens) per image or other item, in the order of
    their tokens; `cache_salt`; `prompt_embeds`, a numpy array whose row i stands in for token i.
    `read_cache=False` (prompt log-probabilities are wanted) takes no hits, `write_cache=False` leaves
    nothing behind. Hashes are computed once and stay through preemption.

    >>> request = Request("r1", range(40))
    >>> request.append_tokens([7, 8])
    >>> request.num_tokens
    42
    """

    __slots__ = (
        "_chain",
        "_chain_key",
        "_token_ids",
        "cache_salt",
        "lora",
        "mm_items",
        "prompt_embeds",
        "read_cache",
        "request_id",
        "write_cache",
    )

    def __init__(
        self,
        request_id: str,
        token_ids: np.ndarray | Sequence[int],
        *,
        lora: tuple[str, str] | None = None,
        mm_items: Iterable[tuple[str, int, int]] = (),
        cache_salt: str | None = None,
        prompt_embeds: np.ndarray | None = None,
        read_cache: bool = True,
        write_cache: bool = True,
    ) -> None:
        self.request_id = request_id
        self._token_ids = token_array(token_ids, "token_ids")
        if len(self._token_ids) == 0:
            raise ValueError(f"token_ids of request {request_id!r} is empty: expected 1 or more")
        self.lora = lora
        self.mm_items = list(mm_items)
        for identifier, first, length in self.mm_items:
            if first < 0 or length < 1:
                raise ValueError(
                    f"mm_items: {identifier!r} starts at {first} and has {length} tokens: "
                    "expected a start of 0 or more and 1 token or more"
                )
        self.cache_salt = cache_salt
        self.prompt_embeds = prompt_embeds
        self.read_cache = read_cache
        self.write_cache = write_cache
        self._chain = None
        self._chain_key = None

    @property
    def num_tokens(self) -> int:
        """Tokens known so far."""
        return len(self._token_ids) if self._chain is None else self._chain.num_tokens

    @property
    def token_ids(self) -> np.ndarray:
        """int32[num_tokens], a copy."""
        return self._token_ids.copy() if self._chain is None else self._chain.token_ids()

    def append_tokens(self, token_ids: np.ndarray | Sequence[int]) -> None:
        """Adds tokens that were sampled or accepted; the next step caches the blocks they fill."""
        if self._chain is None:
            new = token_array(token_ids, "token_ids")
            self._token_ids = np.concatenate([self._token_ids, new])
        else:
            self._chain.append(token_ids)

    def chain(self, key: tuple[int, bytes]) -> core.TokenChain:
        """The native tokens and hashes for `key`, (block size, first parent hash); made once."""
        if self._chain_key == key:
            return self._chain
        block_size, parent = key
        tokens = self.token_ids
        extras: list[bytes] = []
        # Blocks behind the prompt's last one carry what every block carries: the adapter alone.
        later = b"" if self.lora is None else encode_extra_keys([("lora", *self.lora)])
        if self.mm_items or self.cache_salt is not None or self.prompt_embeds is not None:
            num_blocks = -(-len(tokens) // block_size)
            for keys in request_extra_keys(self, block_size, 0, num_blocks):
                extras.append(encode_extra_keys(keys))
        chain = core.TokenChain(
            block_size, parent, extras, later, self.read_cache, self.write_cache
        )
        chain.append(tokens)
        self._chain, self._chain_key = chain, key
        self._token_ids = None
        return chain
