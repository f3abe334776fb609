"""A token reads the state that the token before it left (Mamba, linear attention).

`align` mode: a step updates the state in place, in the page of the block of its last token; where
that is another block than before, the plan copies the state there first. The page left behind is
cached, and can be hit, if a step ended exactly at its block's boundary; or, where `hash_block_size` is
finer than the block, if a step of the prompt ended at a hash boundary. `checkpoint_tokens` of the
manager says where a scheduler that wants hits ends its prefill chunks.
"""

from kvcache.kinds.base import KindProperties
from kvcache.kinds.registry import register
from kvcache.native.load import core


@register("recurrent")
class Recurrent(KindProperties, core.RecurrentState):
    """No options."""

    pages = "state"

    def max_pages(self, num_tokens: int, step_tokens: int, tokens_per_page: int) -> int:
        """The running state, and the one that it is copied from."""
        return 2
