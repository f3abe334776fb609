"""The registry of attention kinds, and what one is."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvcache.native.load import core

_KINDS: dict[str, Callable[..., core.AttentionKind]] = {}


class AttentionKind(core.AttentionKind):
    """Base of kinds written in Python: pages of KV of which a query reads those from some token on.

    Its options come as keyword arguments of the constructor, which calls `super().__init__()`.
    `first_needed_token` is called natively, for each row and step: an exception in it goes to
    `sys.unraisablehook` and counts as 0, with which no block is dropped and none may be missing.
    """

    def first_needed_token(self, num_computed_tokens: int) -> int:
        """The first token that the token at `num_computed_tokens`, or any after it, reads.

        0 to `num_computed_tokens`; never less for more computed tokens.
        """
        raise NotImplementedError


def register(name: str) -> Callable:
    """Decorator: makes a kind (a class, or what makes an instance) known as `name`."""

    def add(make: Callable[..., core.AttentionKind]) -> Callable:
        if name in _KINDS:
            raise ValueError(f"name is {name!r}: expected one that is not registered yet")
        _KINDS[name] = make
        return make

    return add


def kind_names() -> list[str]:
    """Names of all registered kinds, sorted."""
    return sorted(_KINDS)


def make_kind(name: str, options: Mapping[str, int]) -> core.AttentionKind:
    """An instance of the kind; ValueError for an unknown name, TypeError for wrong options."""
    make = _KINDS.get(name)
    if make is None:
        raise ValueError(f"kind is {name!r}: expected one of {', '.join(kind_names())}")
    try:
        return make(**options)
    except TypeError as error:
        reason = str(error).splitlines()[0]
        raise TypeError(
            f"options of group kind {name!r} are {dict(options)}: it takes others ({reason})"
        ) from None
