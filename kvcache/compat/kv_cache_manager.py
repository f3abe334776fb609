# SPDX-License-Identifier: Apache-2.0
"""The request-level manager of vLLM's first v1 engine (`vllm/v1/core/kv_cache_manager.py` up to version
0.7), over `kvcache.KVCacheManager`.

A caller replaces `from vllm.v1.core.kv_cache_manager import` by
`from kvcache.compat.kv_cache_manager import`. Requests are any objects with the attributes of
`RequestLike`.

| there | here |
|---|---|
| `KVCacheManager(block_size, num_gpu_blocks, max_model_len, sliding_window, enable_caching, num_preallocate_tokens)` | the same; `num_gpu_blocks` includes the null block, so add one for the same capacity. Other keywords are those of `kvcache.CacheOptions` |
| `get_computed_blocks(request)` | the same: blocks and tokens. The last token is never reported as computed |
| `allocate_slots(request, num_tokens, computed_blocks)` | the same, also with `num_lookahead_tokens` |
| `append_slots(request, num_tokens)` | the same |
| `num_computed_tokens` of a request may fall | only by the tokens after its last full block: full blocks are cached, and not written again |
| `KVCacheBlock`, an object with `block_id` | an integer that also has `block_id` |
| `free(request)`, `get_num_common_prefix_blocks(request, num_running_requests)`, `reset_prefix_cache()` | the same |
| `free_block_hashes(request)` | not needed: hashes end with the request object |
| a block that leaves the window is null in the manager's list only | the same; `manager.block_ids` of the kernel's manager has the list |
| later versions: `allocate_slots` of running requests, several groups, external tokens | `kvcache.KVCacheManager`: `step`, or `admit` and `extend` |

>>> from types import SimpleNamespace as SomeRequest
>>> manager = KVCacheManager(16, num_gpu_blocks=9, max_model_len=128, num_preallocate_tokens=0)
>>> first = SomeRequest(request_id="r1", all_token_ids=[*range(40)], num_computed_tokens=0)
>>> computed, num_computed = manager.get_computed_blocks(first)
>>> manager.allocate_slots(first, 40 - num_computed, computed)
[1, 2, 3]
>>> first.num_computed_tokens = 40
>>> first.all_token_ids += [7] * 9
>>> [block.block_id for block in manager.append_slots(first, 9)]
[4]
>>> second = SomeRequest(request_id="r2", all_token_ids=[*range(40)], num_computed_tokens=0)
>>> manager.get_computed_blocks(second)
([1, 2], 32)
"""  # noqa: E501

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvcache import allocator
from kvcache.allocator import Admit, CacheArguments, Request
from kvcache.checks import integer, listed, shown

if TYPE_CHECKING:
    from typing_extensions import Unpack


class RequestLike(Protocol):
    """What the manager reads of a request.

    Optional attributes: `status`, an enum member or its name; `lora_request`, with `lora_name` and
    `lora_path`; `mm_features`, each with `identifier` and `mm_position` (`offset`, `length`), or
    `mm_hashes` and `mm_positions`; `cache_salt`; `prompt_embeds`; `skip_reading_prefix_cache`, or
    `sampling_params.prompt_logprobs`, to compute all tokens; and `skip_writing_prefix_cache`.
    """

    @property
    def request_id(self) -> str:
        """A name that is unique among live requests."""

    @property
    def all_token_ids(self) -> Sequence[int]:
        """The known tokens. Tokens are only appended."""

    @property
    def num_computed_tokens(self) -> int:
        """The number of computed tokens. `append_slots` adds slots after them."""


class KVCacheBlock(int):
    """A block id, which also has the attribute of vLLM's block objects."""

    __slots__ = ()

    @property
    def block_id(self) -> int:
        """The id."""
        return int(self)


class V1KVCacheManager:
    """Allocates blocks to requests, with prefix caching, as in vLLM.

    Args:
        block_size: Tokens per block.
        num_gpu_blocks: Number of blocks, including the null block 0.
        max_model_len: Maximum number of tokens of a request.
        sliding_window: Window in tokens. None: full attention.
        enable_caching: Whether later requests can hit full blocks.
        num_preallocate_tokens: A request that needs a block gets this many tokens more, in whole blocks,
            as far as they are free.
        **options: Other fields of `kvcache.CacheOptions`.

    Raises:
        TypeError, ValueError: An argument of the constructor or of a call is invalid. Nothing has
            changed.
    """

    def __init__(
        self,
        block_size: int,
        num_gpu_blocks: int,
        max_model_len: int,
        sliding_window: int | None = None,
        enable_caching: bool = True,
        num_preallocate_tokens: int = 64,
        **options: Unpack[CacheArguments],
    ) -> None:
        self._manager = allocator.KVCacheManager(
            block_size,
            num_gpu_blocks,
            max_model_len,
            sliding_window,
            enable_caching,
            num_preallocate_tokens,
            **options,
        )
        self._admitted: dict[str, Request] = {}
        # For each request of the engine (held weakly), the kernel's request with its block hashes.
        self._seen: dict[str, tuple[weakref.ref[Any], Request]] = {}

    @property
    def manager(self) -> allocator.KVCacheManager:
        """The kernel's manager, with statistics, events, epochs and block counts."""
        return self._manager

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._manager.block_sizes[0]

    def get_computed_blocks(self, request: RequestLike) -> tuple[list[KVCacheBlock], int]:
        """Return the longest run of cached full blocks from the start, and its number of tokens.

        Changes nothing. The last token of a request is never part of the run.
        """
        found = self._manager.cache.find_prefix(self._read(request), whole_blocks=True)
        return _blocks(found.block_ids), found.num_tokens

    def allocate_slots(
        self,
        request: RequestLike,
        num_tokens: int,
        computed_blocks: Sequence[int],
        num_lookahead_tokens: int = 0,
    ) -> list[KVCacheBlock] | None:
        """Admit a request.

        Args:
            request: A request without blocks.
            num_tokens: Number of tokens after the computed ones, at least 1.
            computed_blocks: The blocks of `get_computed_blocks`, or the first of them.
            num_lookahead_tokens: Additional slots for drafts, which are never cached.

        Returns:
            The new blocks. None if they do not fit; nothing has changed.
        """
        num_tokens = integer(num_tokens, "num_tokens", 1)
        num_lookahead = integer(num_lookahead_tokens, "num_lookahead_tokens")
        computed = listed(computed_blocks, "computed_blocks")
        mine = self._read(request)
        num_known = min(num_tokens, max(mine.num_tokens - len(computed) * self.block_size, 0))
        num_lookahead += num_tokens - num_known
        asked = Admit(mine, num_known, num_lookahead_tokens=num_lookahead)
        # The entry precedes the row, so that an interrupt loses no row.
        self._admitted[mine.request_id] = mine
        try:
            new = self._manager.admit(asked, computed)
        finally:
            if not self._has_row(mine):
                del self._admitted[mine.request_id]
        return None if new is None else _blocks(new)

    def append_slots(self, request: RequestLike, num_tokens: int) -> list[KVCacheBlock] | None:
        """Add slots for the tokens after `request.num_computed_tokens`.

        Args:
            request: A request with blocks.
            num_tokens: Number of tokens, at least 1. Those that are not known yet are drafts.

        Returns:
            The new blocks, `[]` if none is needed. None if they do not fit; nothing has changed.
        """
        num_tokens = integer(num_tokens, "num_tokens", 1)
        mine = self._with_blocks(request)
        ids, name = self._new_ids(request, mine), "request.num_computed_tokens"
        start = integer(_of(request, "num_computed_tokens"), name, 0, mine.num_tokens + len(ids))
        row = self._manager.row(mine)
        try:
            (new,) = self._manager.advance(
                [row], [start], [start + num_tokens], token_ids=ids, num_token_ids=[len(ids)]
            )
        except ValueError as error:
            raise ValueError(
                f"num_computed_tokens of request {mine.request_id!r} is {start}, num_tokens is "
                f"{num_tokens}: {error}"
            ) from error
        return None if new is None else _blocks(*new)

    def free(self, request: RequestLike) -> None:
        """Release the blocks of a request, the last one first. Does nothing for a request without blocks.

        The hashes of a preempted request are kept as long as the request object lives.
        """
        mine = self._admitted.get(_of(request))
        if mine is not None:
            self._manager.free(mine)
            self._admitted.pop(mine.request_id, None)

    def get_num_common_prefix_blocks(self, request: RequestLike, num_running_requests: int) -> int:
        """Return the number of a running request's leading blocks that all running requests share."""
        status = getattr(request, "status", None)
        name = getattr(status, "name", status)
        if isinstance(name, str) and name != "RUNNING":
            raise ValueError(
                f"status of request {_of(request)!r} is {name}: expected RUNNING, because only "
                "running requests share blocks"
            )
        mine = self._with_blocks(request)
        return self._manager.cache.num_common_prefix_blocks(mine, num_running_requests)

    def reset_prefix_cache(self) -> bool:
        """Remove all blocks from the cache. Returns False, and changes nothing, if a block is in use."""
        return self._manager.cache.reset()

    def _with_blocks(self, request: RequestLike) -> Request:
        mine = self._admitted.get(_of(request))
        if mine is None:
            raise ValueError(
                f"request {request.request_id!r} has no blocks: expected a call to allocate_slots first"
            )
        return mine

    def _read(self, request: RequestLike) -> Request:
        """Return the kernel's request, with all tokens that are known now."""
        request_id = _of(request)
        seen, admitted = self._seen.get(request_id), self._admitted.get(request_id)
        if admitted is not None and self._has_row(admitted):
            mine = admitted
        elif seen is not None and seen[0]() is request:
            mine = seen[1]
        else:
            mine = Request(request_id, _of(request, "all_token_ids"), **_options(request))
            try:
                engine = weakref.ref(request, partial(_forget, self._seen, request_id))
                self._seen[request_id] = (engine, mine)
            except TypeError:  # hashes are computed again after a preemption
                self._seen.pop(request_id, None)
        mine.append_tokens(self._new_ids(request, mine))
        return mine

    def _has_row(self, mine: Request) -> bool:
        try:
            return self._manager.row(mine) >= 0
        except ValueError:
            return False

    @staticmethod
    def _new_ids(request: RequestLike, mine: Request) -> Sequence[int]:
        """Return the tokens that became known since the last call."""
        ids, num_known = _of(request, "all_token_ids"), mine.num_tokens
        if len(ids) < num_known:
            raise ValueError(
                f"all_token_ids of request {mine.request_id!r} has {len(ids)} tokens: expected "
                f"{num_known} or more, because tokens are only appended"
            )
        new: Sequence[int] = ids[num_known:]
        return new


KVCacheManager = V1KVCacheManager  # the name of the interface


def _forget(
    seen: dict[str, tuple[weakref.ref[Any], Request]], request_id: str, engine: weakref.ref[Any]
) -> None:
    if request_id in seen and seen[request_id][0] is engine:
        del seen[request_id]


def _blocks(ids: Iterable[Any] = ()) -> list[KVCacheBlock]:
    return [*map(KVCacheBlock, ids)]


def _of(request: RequestLike, name: str = "request_id") -> Any:
    value = _read(request, name, "request")
    if name == "request_id" and not isinstance(value, str):
        raise TypeError(f"request_id is {shown(value)}: expected a string")
    return value


def _read(of: object, name: str, what: str) -> Any:
    """Return an attribute. Raises TypeError if there is none. Errors of its own code propagate."""
    try:
        return getattr(of, name)
    except AttributeError:
        if hasattr(type(of), name):
            raise
        raise TypeError(f"{what} is {shown(of)}: expected an object with {name}") from None


def _options(request: RequestLike) -> dict[str, Any]:
    """Return what else the KV of a request depends on, and whether it uses the cache."""
    lora, embeds = (getattr(request, name, None) for name in ("lora_request", "prompt_embeds"))
    logprobs = getattr(getattr(request, "sampling_params", None), "prompt_logprobs", None)
    skips = getattr(request, "skip_reading_prefix_cache", None)
    if lora is not None:
        lora = tuple(_read(lora, name, "lora_request") for name in ("lora_name", "lora_path"))
    return {
        "lora": lora,
        "mm_items": [*_mm_items(request)],
        "cache_salt": getattr(request, "cache_salt", None),
        "prompt_embeds": None if embeds is None else np.asarray(embeds),
        "read_cache": not skips and logprobs is None,
        "write_cache": not getattr(request, "skip_writing_prefix_cache", False),
    }


def _mm_items(request: RequestLike) -> Iterator[tuple[str, int, int]]:
    """Yield the hash, the offset and the length of each multimodal item."""
    names = ("mm_features", "mm_hashes", "mm_positions")
    given = [getattr(request, name, None) for name in names]
    features, hashes, places = (
        [] if each is None else listed(each, name) for each, name in zip(given, names)
    )
    if len(hashes) != len(places):
        raise ValueError(
            f"mm_positions has {len(places)} entries, but mm_hashes has {len(hashes)}: expected equal "
            "lengths, because items without a hash cannot be told apart in the cache"
        )
    for i, each in enumerate(features):
        what = f"mm_features[{i}]"
        name, place = (_read(each, name, what) for name in ("identifier", "mm_position"))
        yield name, *_span(place, f"{what}.mm_position")
    for i, (name, place) in enumerate(zip(hashes, places)):
        yield name, *_span(place, f"mm_positions[{i}]")


def _span(place: object, what: str) -> tuple[int, int]:
    """Return the offset and the length of an item, from an object or a dictionary."""
    if not isinstance(place, dict):
        return _read(place, "offset", what), _read(place, "length", what)
    for name in ("offset", "length"):
        if name not in place:
            raise ValueError(f"{what} is {shown(place)}: expected a key {name!r}")
    return place["offset"], place["length"]
