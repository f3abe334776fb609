# SPDX-License-Identifier: Apache-2.0
"""The reasons why a request's tokens were not found in the prefix cache."""

from __future__ import annotations

from dataclasses import dataclass

# The order must match MissReason in csrc/core/manager/miss_reasons.h.
MISS_REASONS = {
    "not_read": "not looked up",
    "external": "received from another source",
    "not_taken": "cached, but not used, because a shorter hit was taken",
    "not_loaded": "cached on the host, but not loaded",
    "boundary": "cached, but the hit also needs a block, window or state that is not cached",
    "evicted": "evicted",
    "removed": "removed by a reset, an invalidation or a call to evict",
    "in_flight": "being computed by another request",
    "other_keys": "cached or seen only with another salt, adapter or image",
    "new": "not seen before",
    "tail": "at the end of the prompt",
}
"""Reasons for misses, and their descriptions.

- `not_read`: the request or the manager does not use the cache, or its parent had not computed the
  tokens when the request was forked.
- `external`: the KV came from `Admit.external`.
- `not_taken`: the longer hit did not fit, or the caller passed fewer blocks to `admit`.
- `not_loaded`: the hit needs more host blocks than `Admit.max_host_blocks` allows.
- `evicted`, `removed`: the block, or a later block of the request, was evicted to make room, or was
  removed by a reset, an invalidation or a call to `evict`.
- `in_flight`: a running request holds blocks with the same content that are not computed yet. Only the
  64 most recent admissions are compared, and forks are not among them.
- `other_keys`: one of the 64 most recent requests had the same tokens with different extra keys.
- `new`: also used for blocks that left the cache so long ago that their records were dropped.
- `tail`: tokens after the last position at which a hit can end. The last token is always computed.
"""

_TAKERS = {
    0: "a swap or transfer",
    1: "a running request",
    2: "a new request without a hit",
    3: "a new request with a hit",
}


@dataclass(frozen=True)
class MissReport:
    """Why tokens of one request were not found in the cache. See `PrefixCache.explain`.

    Attributes:
        request_id: The request.
        num_tokens: Number of the request's known tokens at admission.
        hit_tokens: Number of tokens that were found in the cache and used.
        missed_tokens: Number of tokens that were not hit, by reason. Reasons without tokens are omitted.
            The values add up to `num_tokens - hit_tokens`.
        lost_seconds_ago: Number of seconds since the first missing block left the cache, modulo about
            310 days, considering only blocks whose eviction or removal was recorded. None if there is
            no such block.
        evicted_by: Name of the eviction policy that evicted this block, from the device or from the
            host. None if the block was not evicted.
        evicted_for: Purpose for which the evicted block's page was needed, such as "a new request
            without a hit".
        nearest_id: ID of the recent request that shares the longest prefix of tokens with this request.
            None if none of the 64 most recent requests starts with the same 16 tokens (or one hash
            block, if that is shorter).
        nearest_tokens: Length of the shared prefix, including tokens that the recent request generated.
        differs_in: The first extra key in which the two requests differ: "cache_salt", "lora",
            "mm_items" or "prompt_embeds". None if they have the same keys.
    """

    request_id: str
    num_tokens: int
    hit_tokens: int
    missed_tokens: dict[str, int]
    lost_seconds_ago: float | None = None
    evicted_by: str | None = None
    evicted_for: str | None = None
    nearest_id: str | None = None
    nearest_tokens: int = 0
    differs_in: str | None = None

    def __str__(self) -> str:
        """Format the report as one log line."""
        text = f"{self.request_id}: {self.hit_tokens:,} of {self.num_tokens:,} prompt tokens were cached"
        missed = self.num_tokens - self.hit_tokens
        if not missed:
            return text
        reasons = [
            f"{count:,} {MISS_REASONS[reason]}{self._detail(reason)}"
            for reason, count in self.missed_tokens.items()
        ]
        return f"{text}, and {missed:,} were not: {', '.join(reasons)}"

    def _detail(self, reason: str) -> str:
        if reason == "evicted" and self.evicted_by is not None:
            by = f"by {self.evicted_by}, for {self.evicted_for}"
            return f" ({self.lost_seconds_ago:.1f} s earlier, {by})"
        if reason == "removed" and self.lost_seconds_ago is not None:
            return f" ({self.lost_seconds_ago:.1f} s earlier)"
        if reason == "other_keys" and self.differs_in is not None:
            return f" ({self.nearest_id} has another {self.differs_in})"
        if reason == "new" and self.nearest_id is not None:
            return f" (equal to {self.nearest_id} up to token {self.nearest_tokens:,})"
        return ""


def report_of(request_id: str, policies: tuple[str, str], native: tuple) -> MissReport:
    """Convert the native manager's report. `policies` evict from the device and from the host."""
    num_tokens, num_hit, missed, lost, num_alike, alike, differs_in = native
    is_evicted, was_on_host, taker, ms_ago = lost or (False, False, 0, 0)
    return MissReport(
        request_id,
        num_tokens,
        num_hit,
        {reason: n for reason, n in zip(MISS_REASONS, missed, strict=True) if n},
        None if lost is None else ms_ago / 1000,
        policies[was_on_host] if is_evicted else None,
        _TAKERS[taker] if is_evicted else None,
        alike or None,
        max(num_alike, 0),
        differs_in or None,
    )
