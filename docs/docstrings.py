"""How `make docs` reads our docstrings: an extension of griffe.

- The `>>>` examples are shown as code, with or without the heading `Example:`.
- The comment at the end of a field's line is the field's documentation.
- The signature that begins the docstring of a native function is shown as code.
- A method that a stub lists in a subclass has the docstring of its base class.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import griffe

# A paragraph that begins with a prompt.
_EXAMPLE = re.compile(r"(?:^|(?<=\n\n))>>> .*?(?=\n\n|\Z)", re.DOTALL)
_SIGNATURE = re.compile(r"\A(\w+\(.*\) -> .*)$", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Adds fences around examples, and the documentation of fields."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            text = _EXAMPLE.sub(r"```pycon\n\g<0>\n```", text)
            obj.docstring.value = _SIGNATURE.sub(_signature, text)
        elif obj.is_attribute and obj.parent.is_class and obj.lineno:
            lines = obj.lines_collection[obj.filepath][obj.lineno - 1 : obj.endlineno]
            comments = [line.partition("  # ")[2] for line in lines]
            if any(comments):
                obj.docstring = griffe.Docstring(" ".join(filter(None, comments)), parent=obj)

    def on_package(self, *, pkg: griffe.Module, **kwargs: object) -> None:
        for each in _classes(pkg):
            for name, method in each.functions.items():
                if not method.docstring:
                    bases = (base.members.get(name) for base in each.mro())
                    method.docstring = next((base.docstring for base in bases if base), None)


def _classes(scope: griffe.Module | griffe.Class) -> Iterator[griffe.Class]:
    """Yield the public classes that a module and its submodules define."""
    for each in scope.members.values():
        if not each.is_alias and (each.is_module or each.is_class):
            if each.is_class and each.is_public:
                yield each
            yield from _classes(each)


def _signature(match: re.Match[str]) -> str:
    plain = re.sub(r"kvcache\._core\.|typing\.SupportsInt \| |numpy\.typing\.", "", match[0])
    return f"```python\n{plain.replace('typing.SupportsIndex', 'int')}\n```\n"
