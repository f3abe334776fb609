"""The properties of an attention kind, and the base class of kinds written in Python."""

from __future__ import annotations

from array import array
from typing import ClassVar, Literal

from kvcache.checks import MAX_INT64, instance, integer
from kvcache.native.load import core

# The content of a kind's pages: KV of block_size tokens; the state of a request at the end of a
# block; KV of the encoder's tokens, which no other request can use; KV of the last tokens of a request,
# in blocks that are written round.
Pages = Literal["tokens", "state", "encoder", "circular"]


class KindError(ValueError):
    """A method of a kind raised, or answered what it must not."""


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

    @property
    def num_speculative_blocks(self) -> int:
        """Of states: the most drafts of a step, each of which has a page and a column of the table."""
        return 0

    def max_live_tokens(self, num_tokens: int, step_tokens: int) -> int:
        """At most this many tokens of a request of `num_tokens` are needed in one step.

        From the first token that the step reads to the last that it computes, `step_tokens` at most:
        `min(num_tokens, step_tokens)` or more.
        """
        check_tokens(num_tokens, step_tokens)
        return num_tokens

    def max_pages(self, num_tokens: int, step_tokens: int, tokens_per_page: int) -> int:
        """At most this many pages are held at a time by a request of `num_tokens`.

        `step_tokens`: the most tokens of a step. `tokens_per_page`: over all context-parallel ranks.
        1 or more.
        """
        _check_asked(self, num_tokens, step_tokens, tokens_per_page)
        live_tokens = _max_live_tokens(self, num_tokens, step_tokens)
        # One page more: the live tokens may begin inside a block.
        return min(
            -(-num_tokens // tokens_per_page),
            -(-live_tokens // tokens_per_page) + 1,
        )

    def check_rule(self, num_tokens: int) -> None:
        """KindError where `first_needed_token` of a position below `num_tokens` is wrong.

        The rules of this package's kinds are native and right.
        """


class AttentionKind(KindProperties, core.AttentionKind):
    """Base of kinds written in Python: pages of KV, of which a query reads those from some token on.

    A constructor with options calls `super().__init__()`. The manager calls `first_needed_token`
    natively, once per position: an exception in it goes to `sys.unraisablehook` and counts as 0, with
    which no block is dropped and none may be missing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._longest_reach = array("q")  # [n]: most tokens before any of the tokens up to n
        self._last_first = 0  # first needed token of the last position asked

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
        check_tokens(num_tokens, step_tokens)
        self.check_rule(num_tokens)
        return self._longest_reach[num_tokens - 1] + step_tokens

    def check_rule(self, num_tokens: int) -> None:
        """As in `KindProperties`; asks each position once."""
        reach = self._longest_reach
        window = self.window
        if window is not None and len(reach) < num_tokens:
            try:
                window = integer(window, f"{type(self).__name__}.window", least=1)
            except (TypeError, ValueError) as error:
                raise KindError(str(error)) from None
        for position in range(len(reach), num_tokens):
            first = _first_needed_token(self, position)
            if first < self._last_first:
                raise KindError(
                    f"{type(self).__name__}.first_needed_token({position}) is {first}: "
                    f"expected {self._last_first} or more, the answer for {position - 1}"
                )
            if window is not None and position - first >= window:
                raise KindError(
                    f"{type(self).__name__}.window is {window}: expected {position - first + 1} or more, "
                    f"as first_needed_token({position}) is {first}"
                )
            self._last_first = first
            reach.append(max(position - first, reach[-1] if reach else 0))


def check_tokens(num_tokens: int, step_tokens: int) -> None:
    """Of a request, and of one of its steps. TypeError or ValueError."""
    integer(num_tokens, "num_tokens", 1, MAX_INT64)
    integer(step_tokens, "step_tokens", 1, MAX_INT64)


def checked_first_live_token(kind: KindProperties, start: int, stop: int) -> int:
    """The first token that a step reads which computes the tokens [start, stop) of a request.

    Of no tokens: that the next token reads. KindError where the kind's rule is wrong before `stop`, or
    more is read than the kind's `max_live_tokens` says.
    """
    instance(kind, KindProperties, "kind")
    start = integer(start, "start", 0, MAX_INT64 - 1)
    stop = max(integer(stop, "stop", 0, MAX_INT64), start + 1)
    kind.check_rule(stop)
    first = _first_needed_token(kind, start)
    bound = _max_live_tokens(kind, stop, stop - start)
    if stop - first > bound:
        name = type(kind).__name__
        raise KindError(
            f"{name}.max_live_tokens({stop}, {stop - start}) is {bound}: expected {stop - first} "
            f"or more, as {name}.first_needed_token({start}) is {first}"
        )
    return first


def checked_max_pages(
    kind: KindProperties, num_tokens: int, step_tokens: int, tokens_per_page: int
) -> int:
    """`kind.max_pages(...)`; KindError for a wrong answer, TypeError or ValueError for what is asked."""
    _check_asked(kind, num_tokens, step_tokens, tokens_per_page)
    return _answer(kind, "max_pages", (num_tokens, step_tokens, tokens_per_page), 1)


def _check_asked(
    kind: KindProperties, num_tokens: int, step_tokens: int, tokens_per_page: int
) -> None:
    instance(kind, KindProperties, "kind")
    check_tokens(num_tokens, step_tokens)
    integer(tokens_per_page, "tokens_per_page", 1, MAX_INT64)


def check_planned_pages(
    kind: KindProperties, num_tokens: int, step_tokens: int, tokens_per_page: int
) -> None:
    """KindError where `max_pages` is less than a request of `num_tokens` holds by the kind's rule.

    Asks only kinds that bring a formula of their own, as the others follow from the rule, and those
    whose blocks are written round: their buffer must hold what a step reads and writes.
    """
    _check_asked(kind, num_tokens, step_tokens, tokens_per_page)
    if kind.pages == "circular":
        needed = min(kind.max_live_tokens(num_tokens, min(step_tokens, num_tokens)), num_tokens)
        places = -(-kind.buffer // tokens_per_page) * tokens_per_page
        if needed > places:
            raise KindError(
                f"options of {type(kind).__name__} have buffer {kind.buffer}: expected {needed} or more, "
                f"window - 1 and the {min(step_tokens, num_tokens)} tokens of a step"
            )
    if not _has_own_bound(type(kind)):
        return
    planned = checked_max_pages(kind, num_tokens, step_tokens, tokens_per_page)
    name, num_all = type(kind).__name__, -(-num_tokens // tokens_per_page)
    call = f"{name}.max_pages({num_tokens}, {step_tokens}, {tokens_per_page}) is {planned}"
    if kind.pages != "tokens":
        num_drafts = min(kind.num_speculative_blocks, num_tokens - 1)
        held = {"encoder": num_all, "state": min(num_all, 2) + num_drafts}.get(kind.pages, 0)
        if kind.pages == "circular":
            held = -(-min(num_tokens, kind.buffer) // tokens_per_page)
        if held > planned:
            raise KindError(f"{call}: expected {held} or more, as its pages hold {kind.pages!r}")
        return
    # Of the steps whose last token is in the same page, the one that begins first holds most.
    later = range(1 + -step_tokens % tokens_per_page, num_tokens, tokens_per_page)
    for start in (0, *later):
        first = _first_needed_token(kind, start)
        stop = min(start + step_tokens, num_tokens)
        held = -(-stop // tokens_per_page) - first // tokens_per_page
        if held > planned:
            raise KindError(
                f"{call}: expected {held} or more, as {name}.first_needed_token({start}) is {first}"
            )


def _has_own_bound(kind: type[KindProperties]) -> bool:
    """Whether planning asks a formula that this package did not write."""
    methods = (getattr(kind, name) for name in ("max_pages", "max_live_tokens"))
    return not all(getattr(each, "__module__", "").startswith("kvcache.kinds.") for each in methods)


def _first_needed_token(kind: KindProperties, num_computed_tokens: int) -> int:
    return _answer(kind, "first_needed_token", (num_computed_tokens,), 0, num_computed_tokens)


def _max_live_tokens(kind: KindProperties, num_tokens: int, step_tokens: int) -> int:
    least = min(num_tokens, step_tokens)
    return _answer(kind, "max_live_tokens", (num_tokens, step_tokens), least)


def _answer(
    kind: KindProperties, method: str, arguments: tuple[int, ...], least: int, most: int = MAX_INT64
) -> int:
    call = f"{type(kind).__name__}.{method}({', '.join(map(str, arguments))})"
    try:
        answer = getattr(kind, method)(*arguments)
    except KindError:  # of another method, which it asked
        raise
    except Exception as error:
        raise KindError(f"{call} raised {type(error).__name__}: {error}") from error
    try:
        return integer(answer, call, least, most)
    except (TypeError, ValueError) as error:
        raise KindError(str(error)) from None
