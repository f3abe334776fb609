"""The properties of an attention kind, and the base class of kinds written in Python."""

from __future__ import annotations

from array import array
from typing import ClassVar, Literal

from kvcache.checks import integer
from kvcache.native.load import core

# The content of a kind's pages: KV of block_size tokens; the state of a request at the end of a
# block; KV of the encoder's tokens, which no other request can use.
Pages = Literal["tokens", "state", "encoder"]


class KindError(ValueError):
    """`first_needed_token` of a kind raised, or answered what it must not."""


class KindProperties:
    """The questions that planning, tables, replay and verification ask a kind.

    Its options are the keyword arguments of its constructor, all integers.
    """

    pages: ClassVar[Pages] = "tokens"

    def __init__(self) -> None:
        super().__init__()

    @property
    def window(self) -> int | None:
        """Tokens that a query sees, itself included; None: not one number for every query.

        A group's block table shows entries before the window as the null block.
        """
        return None

    def max_live_tokens(self, num_tokens: int, step_tokens: int) -> int:
        """At most this many tokens of a request of `num_tokens` are needed in one step.

        From the first token that the step reads to the last that it computes, `step_tokens` at most.
        """
        return num_tokens

    def max_pages(self, num_tokens: int, step_tokens: int, tokens_per_page: int) -> int:
        """At most this many pages are held at a time by a request of `num_tokens`.

        `step_tokens`: the most tokens of a step. `tokens_per_page`: over all context-parallel ranks.
        """
        live_tokens = self.max_live_tokens(num_tokens, step_tokens)
        # One page more: the live tokens may begin inside a block.
        return min(
            -(-num_tokens // tokens_per_page),
            -(-live_tokens // tokens_per_page) + 1,
        )


class AttentionKind(KindProperties, core.AttentionKind):
    """Base of kinds written in Python: pages of KV, of which a query reads those from some token on.

    A constructor with options calls `super().__init__()`. The manager calls `first_needed_token`
    natively, once per position: an exception in it goes to `sys.unraisablehook` and counts as 0, with
    which no block is dropped and none may be missing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._longest_reach = array("q")  # [n]: most tokens before any of the tokens up to n

    def first_needed_token(self, num_computed_tokens: int) -> int:
        """The first token that the token at `num_computed_tokens`, or any after it, reads.

        0 to `num_computed_tokens`; never less for more computed tokens.
        """
        raise NotImplementedError

    def max_live_tokens(self, num_tokens: int, step_tokens: int) -> int:
        """As in `KindProperties`; derived from `first_needed_token` of every position before the end.

        Override it where a formula is known and requests have tens of millions of tokens. Raises
        KindError.
        """
        reach = self._longest_reach
        for position in range(len(reach), num_tokens):
            first = checked_first_needed_token(self, position)
            reach.append(max(position - first, reach[-1] if reach else 0))
        return reach[num_tokens - 1] + step_tokens


def checked_first_needed_token(kind: core.AttentionKind, num_computed_tokens: int) -> int:
    """`kind.first_needed_token(num_computed_tokens)`; KindError for a wrong answer."""
    call = f"{type(kind).__name__}.first_needed_token({num_computed_tokens})"
    try:
        answer = kind.first_needed_token(num_computed_tokens)
    except Exception as error:
        raise KindError(f"{call} raised {type(error).__name__}: {error}") from error
    try:
        return integer(answer, call, 0, num_computed_tokens)
    except (TypeError, ValueError) as error:
        raise KindError(str(error)) from None
