# SPDX-License-Identifier: Apache-2.0
"""A request: its tokens, all other inputs on which its KV depends, and its block hashes."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from operator import attrgetter, index

import numpy as np

from kvcache.allocator.event_stream import RequestLabels
from kvcache.allocator.hashing import HashKey, token_sequence
from kvcache.checks import MAX_INT32, flag, instance, integer, listed, shown, text
from kvcache.native.load import core


def _read_only(name: str, doc: str) -> property:
    return property(attrgetter(f"_{name}"), doc=doc)


class RequestState(Enum):
    """The state of an admitted request.

    - `RUNNING`: the request can be served.
    - `RECEIVING`: the KV of its external tokens is being transferred. See
      `KVCacheManager.finish_receiving`.
    - `SWAPPED_OUT`: its blocks are on the host.
    """

    RUNNING = "running"
    RECEIVING = "receiving"
    SWAPPED_OUT = "swapped out"


class Request:
    """A request with its known tokens (prompt and generated tokens) and their block hashes.

    Tokens can be appended. All other inputs of the hashes are read-only. Hashes are computed once,
    are kept when the request is preempted, and can be used by any number of managers.

    Args:
        request_id: Name that identifies the request in managers. Do not change it while the request
            is admitted.
        token_ids: int32[n], or any collection of integers from 0 to 2**31 - 1. The tokens are
            copied. With `mm_items`, `prompt_embeds` or `block_hashes`, negative values are
            placeholders. A request may be created without tokens. `KVCacheManager.admit` can then
            allocate slots for it immediately, whereas `step` accepts it only after tokens were
            appended.
        lora: (name, path) or (name, path, version) of the adapter. If the weights of an adapter change
            under the same name and path, give it another version, or call
            `PrefixCache.forget_adapter`.
        mm_items: (identifier, first token, number of tokens) of each image or other multimodal item.
            An item may lie beyond the tokens known so far.
        cache_salt: Requests with different salts never share blocks.
        prompt_embeds: Array whose row i replaces token i. The array is not copied and must not change.
            It may have fewer rows than there are tokens, or additional rows for future tokens.
        prompt_is_token_ids: bool[number of rows], for prompts that mix token ids and embeddings. Where
            it is True, the token's own embedding is used, and the row has no effect. None: all rows
            replace tokens.
        read_cache: Whether the request uses cached blocks. Set it to False if all tokens must be
            computed, for example for prompt log probabilities.
        write_cache: Whether the request's blocks are cached.
        num_encoder_tokens: Number of tokens that cross-attention groups store for the request. A
            request with encoder tokens does not use cached blocks, and its blocks are not cached.
        block_hashes: Hashes computed by the engine: one hash of `hash_bytes` bytes for each full block
            of `hash_block_size` known tokens, as configured in the manager. With
            `num_hash_lookahead_tokens`, a block is treated as full once that many tokens after it are
            known. kvcache does not compute hashes for this request. The list is not copied. Extend
            the list before you append the tokens of another block, and do not change its entries. When
            the request is first passed to a manager, the number of entries must equal the number of
            full blocks. Afterwards, it must be at least the number of full blocks. Otherwise the
            call (`step`, `append_tokens`) raises ValueError and changes nothing.
        session: Name of the session, reported in events.

    Raises:
        TypeError, ValueError: An argument has the wrong type or value.

    >>> request = Request("r1", range(40))
    >>> request.append_tokens([7, 8])
    >>> request
    Request('r1', num_tokens=42)
    """

    __slots__ = (
        "_block_hashes",
        "_cache_salt",
        "_chains",
        "_has_extra_keys",
        "_last",
        "_lora",
        "_mm_items",
        "_num_encoder_tokens",
        "_prompt_embeds",
        "_prompt_is_token_ids",
        "_read_cache",
        "_session",
        "_tokens",
        "_write_cache",
        "request_id",
    )

    lora = _read_only("lora", "(name, path) or (name, path, version) of the adapter, or None.")
    mm_items = _read_only("mm_items", "Tuple of (identifier, first token, number of tokens).")
    cache_salt = _read_only(
        "cache_salt", "Cache salt, or None. Requests with different salts never share blocks."
    )
    prompt_embeds = _read_only("prompt_embeds", "Array whose rows replace tokens, or None.")
    prompt_is_token_ids = _read_only(
        "prompt_is_token_ids", "For each row of `prompt_embeds`, whether it is unused, or None."
    )
    read_cache = _read_only("read_cache", "Whether the request uses cached blocks.")
    write_cache = _read_only("write_cache", "Whether the blocks of the request are cached.")
    num_encoder_tokens = _read_only(
        "num_encoder_tokens", "Encoder tokens, for cross-attention groups."
    )
    block_hashes = _read_only("block_hashes", "The engine's list of hashes, or None.")
    session = _read_only("session", "Session reported in events, or None.")

    def __init__(
        self,
        request_id: str,
        token_ids: np.ndarray | Iterable[int],
        *,
        lora: tuple[str, str] | tuple[str, str, str] | None = None,
        mm_items: Iterable[tuple[str, int, int]] = (),
        cache_salt: str | None = None,
        prompt_embeds: np.ndarray | None = None,
        prompt_is_token_ids: np.ndarray | Iterable[bool] | None = None,
        read_cache: bool = True,
        write_cache: bool = True,
        num_encoder_tokens: int = 0,
        block_hashes: list[bytes] | None = None,
        session: str | None = None,
    ) -> None:
        self.request_id = request_id
        self._lora = None if lora is None else _checked_lora(lora)
        self._mm_items = _checked_items(mm_items)
        self._cache_salt = None if cache_salt is None else text(cache_salt, "cache_salt")
        self._prompt_embeds = None if prompt_embeds is None else _checked_embeds(prompt_embeds)
        self._prompt_is_token_ids = None
        if prompt_is_token_ids is not None:
            self._prompt_is_token_ids = _checked_mask(prompt_is_token_ids, self._prompt_embeds)
        self._num_encoder_tokens = integer(num_encoder_tokens, "num_encoder_tokens")
        self._read_cache = flag(read_cache, "read_cache") and not num_encoder_tokens
        self._write_cache = flag(write_cache, "write_cache") and not num_encoder_tokens
        self._has_extra_keys = not (
            lora is None and not self._mm_items and cache_salt is None and prompt_embeds is None
        )
        if block_hashes is not None and not isinstance(block_hashes, list | core.HashedTokens):
            raise TypeError(
                f"block_hashes has type {type(block_hashes).__name__}: expected a list of bytes"
            )
        self._block_hashes = block_hashes
        self._session = None if session is None else text(session, "session")
        has_placeholders = bool(self._mm_items) or not (
            prompt_embeds is None and block_hashes is None
        )
        if isinstance(block_hashes, core.HashedTokens):  # its tokens may already have been taken
            self._tokens = block_hashes.take_tokens()
            self._tokens.append(token_sequence(token_ids)[len(self._tokens) :])
        else:
            self._tokens = core.TokenIds(token_sequence(token_ids), has_placeholders)
        self._chains: dict[HashKey, core.TokenChain] = {}
        self._last: tuple = (None, None)  # key and result of the last `chain` call

    def __reduce__(self) -> tuple:
        """Pickle tokens and options, without computed hashes."""
        options = {name: getattr(self, name) for name in _OPTIONS}
        return _unpickled, (self.request_id, self.token_ids, options)

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, num_tokens={self.num_tokens})"

    @property
    def num_tokens(self) -> int:
        """Number of known tokens."""
        return len(self._tokens)

    @property
    def token_ids(self) -> np.ndarray:
        """A copy of the known tokens, int32[num_tokens]."""
        return self._tokens.copy()

    def append_tokens(self, token_ids: np.ndarray | Iterable[int]) -> None:
        """Append sampled or accepted tokens. The next step caches the blocks that they fill."""
        self._tokens.append(token_sequence(token_ids))

    def chain(self, key: HashKey) -> core.TokenChain:
        """Return the native hashes for `key`, which are created once per key."""
        # A manager passes the same tuple in every call, so comparing identities avoids hashing it.
        last_key, chain = self._last
        if key is last_key:
            return chain
        instance(key, HashKey, "key")
        own = key.of_adapter(self._lora and self._lora[0]) if key.forgotten else key
        if self._block_hashes is not None and own.parent != key.parent:
            raise ValueError(
                f"block_hashes of request {self.request_id!r} are given: expected None, because adapter "
                f"{self._lora[0]!r} was forgotten, and its hashes must be new"
            )
        chain = self._chains.get(own)
        if chain is None:
            chain = self._chains.setdefault(own, self._make_chain(own))
        self._last = (key, chain)
        return chain

    def _make_chain(self, key: HashKey) -> core.TokenChain:
        plain = (self._tokens, key.block_size, key.parent, self._read_cache, self._write_cache)
        options = {"num_encoder_tokens": self._num_encoder_tokens, "labels": self._labels(key)}
        if self._block_hashes is not None:
            given = self._given_hashes(key)
            plain += (self._lora,)  # not hashed
            return core.TokenChain(*plain, given=given, num_lookahead=key.num_lookahead, **options)
        if key.is_given:
            raise ValueError(
                f"block_hashes of request {self.request_id!r} is None: expected its hashes, as the "
                f"manager's hash_algorithm is {shown(key.algorithm)}"
            )
        if not self._has_extra_keys:
            return core.TokenChain(*plain, algorithm=key.algorithm, **options)
        return core.TokenChain(
            *plain,
            self._lora,
            self._mm_items,
            self._cache_salt,
            self._prompt_embeds,
            algorithm=key.algorithm,
            prompt_is_token_ids=self._prompt_is_token_ids,
            **options,
        )

    def _labels(self, key: HashKey) -> RequestLabels | None:
        if not self._has_extra_keys and self._session is None:
            return None
        return RequestLabels(
            key,
            self._lora,
            self._mm_items,
            self._cache_salt,
            self._prompt_embeds,
            self._session,
            self._prompt_is_token_ids,
        )

    def _given_hashes(self, key: HashKey) -> tuple[list[bytes], str] | core.HashedTokens:
        """Return the engine's list of hashes with the request's name, or the engine's `HashedTokens`."""
        num_blocks = max(self.num_tokens - key.num_lookahead, 0) // key.block_size
        if len(self._block_hashes) != num_blocks:
            followed = f" followed by {key.num_lookahead} tokens" if key.num_lookahead else ""
            raise ValueError(
                f"block_hashes of request {self.request_id!r} has {len(self._block_hashes)} entries: "
                f"expected {num_blocks}, one per full block of {key.block_size} tokens{followed}"
            )
        if isinstance(self._block_hashes, core.HashedTokens):
            return self._block_hashes
        return self._block_hashes, repr(self.request_id)


def append_token_to_each(requests: list[Request], token_ids: np.ndarray) -> None:
    """Append `token_ids[i]` to `requests[i]`. If this fails for one request, no request changes.

    Args:
        requests: The requests.
        token_ids: int[n], one token per request.

    Raises:
        TypeError, ValueError: The lengths differ, or tokens are invalid (`Request.append_tokens`).

    >>> requests = [Request("r1", [5]), Request("r2", [6, 7])]
    >>> append_token_to_each(requests, np.array([8, 9]))
    >>> [request.token_ids.tolist() for request in requests]
    [[5, 8], [6, 7, 9]]
    """
    core.append_token_to_each([request._tokens for request in requests], token_ids)


def last_tokens(requests: list[Request], num_computed: np.ndarray) -> np.ndarray | None:
    """Return each request's last token, int32[n], if it is the request's only token not yet computed.

    Args:
        requests: The requests.
        num_computed: int64[n], the number of computed tokens of each request.

    Returns:
        The tokens, or None if a request does not have `num_computed[i] + 1` tokens.

    >>> requests = [Request("r1", [5]), Request("r2", [6, 7])]
    >>> last_tokens(requests, np.array([0, 1]))
    array([5, 7], dtype=int32)
    >>> last_tokens(requests, np.array([0, 0])) is None
    True
    """
    return core.last_tokens([request._tokens for request in requests], num_computed)


_OPTIONS = (
    *("lora", "mm_items", "cache_salt", "prompt_embeds", "prompt_is_token_ids", "read_cache"),
    *("write_cache", "num_encoder_tokens", "block_hashes", "session"),
)


def _unpickled(request_id: str, token_ids: np.ndarray, options: dict[str, object]) -> Request:
    return Request(request_id, token_ids, **options)


def _checked_lora(lora: tuple[str, ...]) -> tuple[str, ...]:
    expected = "expected (name, path) or (name, path, version)"
    if not isinstance(lora, list | tuple):
        raise TypeError(f"lora is {shown(lora)}: {expected}")
    if len(lora) not in (2, 3):
        raise ValueError(f"lora is {shown(lora)}: {expected}")
    return tuple(text(each, f"lora[{i}]") for i, each in enumerate(lora))


_ITEM = "(identifier, first token, number of tokens)"


def _checked_items(items: Iterable[tuple[str, int, int]]) -> tuple[tuple[str, int, int], ...]:
    items = listed(items, "mm_items", f"a list of {_ITEM}")
    return tuple(_checked_item(i, item) for i, item in enumerate(items))


def _checked_item(i: int, item: tuple[str, int, int]) -> tuple[str, int, int]:
    name, expected = f"mm_items[{i}]", f"expected {_ITEM}"
    if not isinstance(item, list | tuple):
        raise TypeError(f"{name} is {shown(item)}: {expected}")
    if len(item) != 3:
        raise ValueError(f"{name} is {shown(item)}: {expected}")
    identifier = text(item[0], f"{name}[0]")
    try:
        first, length = index(item[1]), index(item[2])
    except TypeError:
        raise TypeError(f"{name} is {shown(item)}: {expected}") from None
    if first < 0 or length < 1 or first + length > MAX_INT32:
        raise ValueError(
            f"{name}: {identifier!r} starts at {shown(first)} and has {shown(length)} tokens: "
            f"expected a start of 0 or more, 1 token or more, and an end of at most {MAX_INT32}"
        )
    return identifier, first, length


def _checked_embeds(rows: np.ndarray) -> np.ndarray:
    if not isinstance(rows, np.ndarray) or rows.dtype.hasobject:
        raise TypeError(f"prompt_embeds has type {type(rows).__name__}: expected a numeric array")
    if rows.ndim == 0:
        raise ValueError("prompt_embeds has 0 dimensions: expected one row per token")
    if len(rows) > MAX_INT32:
        raise ValueError(
            f"prompt_embeds has {len(rows)} rows: expected at most {MAX_INT32}, one per token"
        )
    rows = rows.view()
    rows.setflags(write=False)
    return rows


def _checked_mask(mask: np.ndarray | Iterable[bool], rows: np.ndarray | None) -> np.ndarray:
    name = "prompt_is_token_ids"
    if rows is None:
        raise ValueError(f"{name} is {shown(mask)}: expected None without prompt_embeds")
    if not isinstance(mask, np.ndarray):
        mask = np.array(
            [flag(each, f"{name}[{i}]") for i, each in enumerate(listed(mask, name))], bool
        )
    if mask.dtype != bool:
        raise TypeError(f"{name} has dtype {mask.dtype}: expected bool")
    if mask.shape != rows.shape[:1]:
        raise ValueError(
            f"{name} has shape {list(mask.shape)}: expected [{len(rows)}], one entry per row of "
            "prompt_embeds"
        )
    mask = np.array(mask)  # a copy of the base class
    mask.setflags(write=False)
    return mask
