"""A token reads the state that the token before it left (Mamba, linear attention).

`align` mode: a step updates the state in place, in the page of the block of its last token; where
that is another block than before, the plan copies the state there first. The page left behind is
cached, and can be hit, if a step ended exactly at its block's boundary; or, where `hash_block_size` is
finer than the block, if a step of the prompt ended at a hash boundary. `checkpoint_tokens` of the
manager says where a scheduler that wants hits ends its prefill chunks.

With `num_speculative_blocks` a row has so many pages more, behind that of its state, and takes
rejected drafts back: `docs/hybrid_models.md`, "Drafts and recurrent states".
"""

from kvcache.kinds.base import KindProperties
from kvcache.kinds.registry import register
from kvcache.native.load import core


@register("recurrent")
class Recurrent(KindProperties, core.RecurrentState):
    """`num_speculative_blocks`: the most drafts of a step, each of which has a page for its state."""

    pages = "state"

    def __init__(self, *, num_speculative_blocks: int = 0) -> None:
        core.RecurrentState.__init__(self, num_speculative_blocks)
        self._num_speculative_blocks = num_speculative_blocks

    @property
    def num_speculative_blocks(self) -> int:
        """Pages for the states after a step's drafts."""
        return self._num_speculative_blocks

    def max_pages(self, num_tokens: int, step_tokens: int, tokens_per_page: int) -> int:
        """The running state and those of drafts, and states at the ends of blocks that a step leaves.

        Each is left for one of the blocks that the tokens of the last step end: one without drafts.
        """
        num_states = 1 + self._num_speculative_blocks
        return num_states + -(-num_states // tokens_per_page)
