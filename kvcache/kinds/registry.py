# SPDX-License-Identifier: Apache-2.0
"""The registry of attention kinds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

from kvcache.checks import check_name, instance, num_entries, shown
from kvcache.extensions import load_extensions
from kvcache.kinds.base import AttentionKind, KindProperties
from kvcache.kinds.contents import TOKENS
from kvcache.native.load import core

_KINDS: dict[str, type[KindProperties]] = {}


def register(name: str) -> Callable[[type[KindProperties]], type[KindProperties]]:
    """Register a class as the attention kind `name`. Use it as a decorator.

    The class must derive from `AttentionKind` or from a kind of this package. In the latter case, it must
    not override `first_needed_token`, `pages` and `window`, because the manager uses their native
    implementation. All constructor arguments must be keyword arguments. They are the kind's options.

    Args:
        name: Name of the kind.

    Returns:
        The decorator, which returns the class unchanged.

    Raises:
        TypeError: The class does not derive from a kind, or a constructor argument is not a keyword
            argument.
        ValueError: The name is already registered, or the class overrides a member that must not be
            overridden.
    """
    check_name(name, "name")

    def add(kind: type[KindProperties]) -> type[KindProperties]:
        if name in _KINDS:
            raise ValueError(f"name is {shown(name)}: expected a name that is not in use")
        _check_class(kind, name)
        _KINDS[name] = kind
        return kind

    return add


def kind_names() -> list[str]:
    """Return the sorted names of all registered kinds, including those of extensions."""
    load_extensions()
    return sorted(_KINDS)


def kind_class(name: str) -> type[KindProperties]:
    """Return the class registered under a name. Raises ValueError for an unknown name."""
    if not isinstance(name, str) or (name not in _KINDS and name not in kind_names()):
        raise ValueError(f"kind is {shown(name)}: expected one of {', '.join(kind_names())}")
    return _KINDS[name]


def make_kind(name: str, options: Mapping[str, int]) -> KindProperties:
    """Create a kind.

    Args:
        name: Name of the kind.
        options: Its options.

    Returns:
        The kind.

    Raises:
        ValueError: The name is unknown, or the options are invalid for the kind.
        TypeError: `options` is not a mapping, or the kind's constructor does not call
            `super().__init__()`.
    """
    kind = kind_class(name)
    instance(options, Mapping, "options")
    num_entries(options, "options")
    parameters = _parameters(kind)
    required = {p.name for p in parameters if p.default is p.empty}
    if not required <= set(options) <= {p.name for p in parameters}:
        written = [f"{p.name}=N" if p.name in required else f"[{p.name}=N]" for p in parameters]
        raise ValueError(
            f"options of kind {name!r} are {shown(dict(options))}: expected {' '.join(written) or 'none'}"
        )
    try:
        return kind(**options)
    except TypeError as error:
        if not str(error).endswith("must be called when overriding __init__"):
            raise
        raise TypeError(
            f"the constructor of kind {name!r}, {kind!r}, does not call super().__init__(): "
            "expected this call before anything else"
        ) from None


def _parameters(kind: type[KindProperties]) -> list[inspect.Parameter]:
    return list(inspect.signature(kind).parameters.values())


def _check_class(kind: type[KindProperties], name: str) -> None:
    base = _base_of(kind)
    if base is None:
        raise TypeError(
            f"kind {name!r} is {shown(kind)}: expected a class derived from AttentionKind, "
            "or from one kind of this package"
        )
    for parameter in _parameters(kind):
        if parameter.kind not in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            raise TypeError(
                f"the constructor of kind {name!r} takes {parameter}: expected named arguments"
            )
    if base is AttentionKind:
        if kind.pages is not TOKENS:  # the native manager assumes token pages
            raise ValueError(f"pages of kind {name!r} is {shown(kind.pages)}: expected 'tokens'")
        if kind.first_needed_token is AttentionKind.first_needed_token:
            raise TypeError(
                f"kind {name!r} does not define first_needed_token: expected this method"
            )
        return
    added = kind.__mro__[: kind.__mro__.index(base)]
    for method in ("first_needed_token", "pages", "window"):
        if any(method in vars(each) for each in added):
            raise TypeError(
                f"kind {name!r} overrides {method} of {base.__name__}, which the native manager "
                "does not call: expected a class derived from AttentionKind"
            )


def _base_of(kind: type) -> type[KindProperties] | None:
    """Return the class's base among `AttentionKind` and the built-in kinds, or None."""
    if not isinstance(kind, type):
        return None
    bases = [
        each
        for each in kind.__mro__
        if issubclass(each, core.AttentionKind) and each.__module__.startswith(f"{__package__}.")
    ]
    return bases[0] if len(bases) == 1 else None
