"""A token reads the state that the token before it left (Mamba, linear attention).

`align` mode: a step updates the state in place, in the page of the block of its last token; where
that is another block than before, the plan copies the state there first. The page left behind is
cached, and can be hit, if a step ended exactly at its block's boundary: a scheduler that wants hits
ends its prefill chunks there.
"""

from kvcache.allocator.groups.base import register
from kvcache.native.load import core

register("recurrent")(core.RecurrentState)
