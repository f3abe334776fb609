# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers (Mamba, linear attention), in which a token reads the state after the previous token.

In `align` mode, a step updates the state in place, in the page of the block that contains the step's
last token. If the previous step ended in another block, the plan first copies the state to the new page.
The old page is cached, and can be hit, if a step ended exactly at the end of the old block or, with a
`hash_block_size` smaller than the block, if a step of the prompt ended at a hash boundary.
`KVCacheManager.checkpoint_tokens` determines where a scheduler should end its prefill chunks so
that states can be hit.

With `num_speculative_blocks`, a row has `num_speculative_blocks` additional pages after the page of
its state, so that rejected drafts can be rolled back. See "Drafts and recurrent states" in
`docs/hybrid_models.md`.
"""

from kvcache.kinds.base import KindProperties
from kvcache.kinds.contents import STATE
from kvcache.kinds.registry import register
from kvcache.native.load import core


@register("recurrent")
class Recurrent(KindProperties, core.RecurrentState):
    """Recurrent state.

    Args:
        num_speculative_blocks: Maximum number of drafts in a step. The state after each draft is
            stored in a separate page.
    """

    pages = STATE

    def __init__(self, *, num_speculative_blocks: int = 0) -> None:
        core.RecurrentState.__init__(self, num_speculative_blocks)
        self._num_speculative_blocks = num_speculative_blocks

    @property
    def num_speculative_blocks(self) -> int:
        """Number of pages for the states after a step's drafts."""
        return self._num_speculative_blocks

    def max_pages(self, num_tokens: int, step_tokens: int, tokens_per_page: int) -> int:
        """Return the number of pages for the running state, draft states, and states at block ends.

        The last step stores one state for each block that the step's tokens may complete. Without
        drafts, this is one state.
        """
        num_states = 1 + self._num_speculative_blocks
        return num_states + -(-num_states // tokens_per_page)

    def most_held(self, num_tokens: int, step_tokens: int, tokens_per_page: int) -> int:
        """Return the number of pages for draft states and for a state that is copied to a new page."""
        num_drafts = min(self._num_speculative_blocks, num_tokens - 1)
        return min(-(-num_tokens // tokens_per_page), 2) + num_drafts
