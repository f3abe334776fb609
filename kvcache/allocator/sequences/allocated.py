"""A sequence that has blocks, and how many of its tokens are computed."""

from __future__ import annotations

from kvcache.allocator.sequences.tokens import Tokens


class AllocatedSequence:
    """The row of a sequence, its tokens, and how many of them were marked as computed.

    `skips_blocks`: the prompt was computed from its own K and V, and no blocks are held of what its
    end does not read (a sliding window).
    """

    __slots__ = (
        "num_cached",
        "num_marked",
        "num_prompt",
        "num_tokens",
        "reads_ids",
        "row",
        "skips_blocks",
        "tokens",
    )

    def __init__(self, row: int, tokens: Tokens, num_cached: int, skips_blocks: bool) -> None:
        self.row = row
        self.tokens = tokens
        self.reads_ids = tokens.are_read
        self.num_tokens = self.num_prompt = len(tokens.ids)  # all have slots
        self.num_cached = num_cached
        self.num_marked = 0  # the sum of all marks, at most `num_tokens`
        self.skips_blocks = skips_blocks

    def forked(self, row: int, tokens: Tokens) -> AllocatedSequence:
        """A child as it begins."""
        child = AllocatedSequence(row, tokens, self.num_cached, self.skips_blocks)
        child.num_prompt, child.num_marked = self.num_prompt, self.num_marked
        return child

    def marks_with(self, count: int, seq_id: object) -> int:
        """The sum of all marks with `count` more."""
        num_marked = min(self.num_marked + count, self.num_tokens)
        if self.skips_blocks and num_marked < self.num_prompt:
            raise ValueError(
                f"{num_marked} tokens of seq {seq_id!r} are marked as computed, a prompt longer than "
                f"the window is computed at once: expected a token_chunk_size of {self.num_prompt}"
            )
        return num_marked

    def num_computed(self, num_marked: int) -> int:
        """Tokens that have KV where the marks come to `num_marked`."""
        # Behind the prompt a step may accept several tokens, whatever its mark says.
        if num_marked < self.num_prompt:
            return num_marked
        return max(num_marked, self.num_tokens - 1)
