"""The registry of attention kinds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

from kvcache.checks import check_name
from kvcache.kinds.base import AttentionKind, KindProperties

_KINDS: dict[str, type[KindProperties]] = {}


def register(name: str) -> Callable[[type[KindProperties]], type[KindProperties]]:
    """Decorator: makes a class of kinds known as `name`. TypeError or ValueError.

    The class derives from `AttentionKind`, or is one of this package's under a second name. All
    arguments of its constructor have names: they are the options of the kind.
    """
    check_name(name, "name")

    def add(kind: type[KindProperties]) -> type[KindProperties]:
        if name in _KINDS:
            raise ValueError(f"name is {name!r}: expected one that is not registered yet")
        _check_class(kind, name)
        _KINDS[name] = kind
        return kind

    return add


def kind_names() -> list[str]:
    """Names of all registered kinds, sorted."""
    return sorted(_KINDS)


def kind_class(name: str) -> type[KindProperties]:
    """The class registered as `name`; ValueError for an unknown name."""
    if name not in _KINDS:
        raise ValueError(f"kind is {name!r}: expected one of {', '.join(kind_names())}")
    return _KINDS[name]


def make_kind(name: str, options: Mapping[str, int]) -> KindProperties:
    """An instance of the kind; ValueError for an unknown name, or options that it does not take."""
    kind = kind_class(name)
    parameters = _parameters(kind)
    required = {p.name for p in parameters if p.default is p.empty}
    if not required <= set(options) <= {p.name for p in parameters}:
        written = [f"{p.name}=N" if p.name in required else f"[{p.name}=N]" for p in parameters]
        raise ValueError(
            f"options of kind {name!r} are {dict(options)}: expected {' '.join(written) or 'none'}"
        )
    return kind(**options)


def _parameters(kind: type[KindProperties]) -> list[inspect.Parameter]:
    return list(inspect.signature(kind).parameters.values())


def _check_class(kind: type[KindProperties], name: str) -> None:
    if not (isinstance(kind, type) and issubclass(kind, KindProperties)):
        raise TypeError(f"kind {name!r} is {kind!r}: expected a class derived from AttentionKind")
    for parameter in _parameters(kind):
        if parameter.kind not in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            raise TypeError(
                f"the constructor of kind {name!r} takes {parameter}: expected arguments with names"
            )
    if issubclass(kind, AttentionKind):
        if kind.pages != "tokens":  # the native manager takes it for one of tokens
            raise ValueError(f"pages of kind {name!r} is {kind.pages!r}: expected 'tokens'")
        return
    own = kind.__mro__[: kind.__mro__.index(KindProperties)]
    if any("first_needed_token" in vars(each) for each in own):  # natively it would not be called
        raise TypeError(
            f"kind {name!r} overrides first_needed_token of {kind.__base__.__name__}: "
            "expected a class derived from AttentionKind"
        )
