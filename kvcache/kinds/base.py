# SPDX-License-Identifier: Apache-2.0
"""The properties of an attention kind, and the base class for kinds written in Python."""

from __future__ import annotations

from array import array
from typing import ClassVar

from kvcache.checks import MAX_INT64, instance, integer
from kvcache.kinds.contents import TOKENS, PageContent
from kvcache.native.load import core


class KindError(ValueError):
    """Raised if a method of a kind raises an exception or returns an invalid value."""


class KindProperties:
    """The properties of a kind that are used by planning, block tables, replay and verification.

    The options of a kind are the keyword arguments of its constructor. All options are integers.
    """

    pages: ClassVar[PageContent] = TOKENS

    def __init__(self) -> None:
        super().__init__()

    @property
    def window(self) -> int | None:
        """Number of tokens that a query attends to, including itself. None: the number varies
        between queries.

        In a group's block table, entries before the window are the null block.
        """
        return None

    @property
    def num_speculative_blocks(self) -> int:
        """For kinds with states, the maximum number of drafts in a step.

        The state after each draft uses a separate page and table column.
        """
        return 0

    def max_live_tokens(self, num_tokens: int, step_tokens: int) -> int:
        """Return an upper bound on the number of a request's tokens that one step needs.

        A step needs all tokens from the first one that it attends to, up to the last one that it
        computes.

        Args:
            num_tokens: Number of tokens in the request.
            step_tokens: Maximum number of tokens in a step.

        Returns:
            At least `min(num_tokens, step_tokens)`.
        """
        check_tokens(num_tokens, step_tokens)
        return num_tokens

    def max_pages(self, num_tokens: int, step_tokens: int, tokens_per_page: int) -> int:
        """Return an upper bound on the number of pages that a request holds at the same time.

        Args:
            num_tokens: Number of tokens in the request.
            step_tokens: Maximum number of tokens in a step.
            tokens_per_page: Tokens per page, over all context-parallel ranks.

        Returns:
            At least 1.
        """
        _check_asked(self, num_tokens, step_tokens, tokens_per_page)
        live_tokens = _max_live_tokens(self, num_tokens, step_tokens)
        # Add one page, because the needed tokens may begin inside a block.
        return min(-(-num_tokens // tokens_per_page), -(-live_tokens // tokens_per_page) + 1)

    def most_held(self, num_tokens: int, step_tokens: int, tokens_per_page: int) -> int | None:
        """Return the maximum number of pages that a request holds, or None if the number can be derived
        from `first_needed_token`.

        Planning checks `max_pages` against this number. The arguments are those of `max_pages`.

        Raises:
            KindError: With the kind's options, a step needs more pages than a request can hold.
        """
        return None

    def check_rule(self, num_tokens: int) -> None:
        """Check `first_needed_token` at all positions below `num_tokens`.

        The rules of built-in kinds are implemented natively and are not checked.

        Raises:
            KindError: A value is invalid.
        """


class AttentionKind(KindProperties, core.AttentionKind):
    """Base class of kinds written in Python. The pages contain KV, and a query attends to the tokens from
    `first_needed_token` onward.

    A constructor with options must call `super().__init__()`. The native manager calls
    `first_needed_token`. If this method raises an exception, the exception is passed to
    `sys.unraisablehook`, and the result is treated as 0: no block is released early, and a hit needs all
    earlier blocks.
    """

    def __init__(self) -> None:
        super().__init__()
        # [n]: the longest distance between a token up to n and a token that it attends to.
        self._longest_reach = array("q")
        self._last_first = 0  # first needed token of the last queried position

    def first_needed_token(self, num_computed_tokens: int) -> int:
        """Return the first token that the token at `num_computed_tokens`, or any later token, attends to.

        Args:
            num_computed_tokens: Position of the token.

        Returns:
            0 to `num_computed_tokens`. Must not decrease as `num_computed_tokens` grows.
        """
        raise NotImplementedError

    def max_live_tokens(self, num_tokens: int, step_tokens: int) -> int:
        """Derive the bound by calling `first_needed_token` at every position. See `KindProperties`.

        If requests have tens of millions of tokens, override this method with a formula.

        Raises:
            KindError: `first_needed_token` returned an invalid value.
        """
        check_tokens(num_tokens, step_tokens)
        self.check_rule(num_tokens)
        return self._longest_reach[num_tokens - 1] + step_tokens

    def check_rule(self, num_tokens: int) -> None:
        """Check each position once. See `KindProperties`."""
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
                    f"expected {self._last_first} or more, the value for {position - 1}"
                )
            if window is not None and position - first >= window:
                raise KindError(
                    f"{type(self).__name__}.window is {window}: expected {position - first + 1} or more, "
                    f"as first_needed_token({position}) is {first}"
                )
            self._last_first = first
            reach.append(max(position - first, reach[-1] if reach else 0))


def check_tokens(num_tokens: int, step_tokens: int) -> None:
    """Raise TypeError or ValueError unless both numbers of tokens are 1 or more."""
    integer(num_tokens, "num_tokens", 1, MAX_INT64)
    integer(step_tokens, "step_tokens", 1, MAX_INT64)


def checked_first_live_token(kind: KindProperties, start: int, stop: int) -> int:
    """Return the first token to which a step that computes tokens [start, stop) of a request attends.

    If the range is empty, return the first token that the next token attends to.

    Raises:
        KindError: The kind's rule is invalid before `stop`, or the step needs more tokens than
            `max_live_tokens`.
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
    """Call `kind.max_pages(...)`, and check that the result is a positive integer.

    Raises:
        KindError: The kind returned an invalid value.
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of range.
    """
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
    """Check that `max_pages` is not below the number of pages that a request holds according to the
    kind's rule.

    Only kinds that override the formula are checked, because all other bounds are derived from the rule.

    Raises:
        KindError: `max_pages` is too small, or `KindProperties.most_held` raises an error.
    """
    _check_asked(kind, num_tokens, step_tokens, tokens_per_page)
    most = kind.most_held(num_tokens, step_tokens, tokens_per_page)
    if not _has_own_bound(type(kind)):
        return
    planned = checked_max_pages(kind, num_tokens, step_tokens, tokens_per_page)
    name = type(kind).__name__
    call = f"{name}.max_pages({num_tokens}, {step_tokens}, {tokens_per_page}) is {planned}"
    if most is not None:
        if most > planned:
            raise KindError(f"{call}: expected {most} or more, as its pages hold {kind.pages!r}")
        return
    # Of all steps whose last token is in the same page, the step that begins first needs the most
    # pages.
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
    """Return whether planning relies on a formula that is defined outside this package."""
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
    except KindError:  # raised by another method that this method called
        raise
    except Exception as error:
        raise KindError(f"{call} raised {type(error).__name__}: {error}") from error
    try:
        return integer(answer, call, least, most)
    except (TypeError, ValueError) as error:
        raise KindError(str(error)) from None
