# SPDX-License-Identifier: Apache-2.0
"""How `make docs` reads our docstrings: an extension of griffe.

- The `>>>` examples are shown as code, with or without the heading `Example:`.
- The comment at the end of a field's line is the field's documentation. The fields of a dataclass
  become one table of parameters.
- The signature that begins the docstring of a native function is shown as code.
- A method that a stub lists in a subclass has the docstring of its base class.
"""

from __future__ import annotations

import re

import griffe

# A paragraph that begins with a prompt.
_EXAMPLE = re.compile(r"(?:^|(?<=\n\n))>>> .*?(?=\n\n|\Z)", re.DOTALL)
# What already documents the fields of a dataclass, and what follows its parameters.
_SECTION = re.compile(r"^(?:Args|Attributes):$", re.MULTILINE)
_END = re.compile(r"^(?:Raises|Examples):$|^```pycon$|\Z", re.MULTILINE)
_SIGNATURE = re.compile(r"\A(\w+\(.*\) -> .*)$", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Adds fences around examples, the documentation of fields, and inherited documentation.

    An object is visited before its members.
    """

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            text = _EXAMPLE.sub(r"```pycon\n\g<0>\n```", text)
            obj.docstring.value = _SIGNATURE.sub(_signature, text)
            if _is_dataclass(obj) and not _SECTION.search(text):
                obj.docstring.value = _with_fields(obj)
        elif obj.is_function and obj.parent.is_class:
            methods = (base.members.get(obj.name) for base in obj.parent.mro())
            obj.docstring = next((each.docstring for each in methods if each), None)
        elif obj.is_attribute and obj.parent.is_class and not _is_parameter(obj):
            if comment := _comment(obj):
                obj.docstring = griffe.Docstring(comment, parent=obj)


def _is_dataclass(obj: griffe.Object) -> bool:
    return obj.is_class and "dataclass" in obj.labels


def _is_parameter(field: griffe.Attribute) -> bool:
    """Return whether the class documents the field as a parameter."""
    owner = field.parent
    return _is_dataclass(owner) and bool(
        owner.docstring and re.search(rf"^    {field.name}: ", owner.docstring.value, re.MULTILINE)
    )


def _comment(field: griffe.Attribute) -> str:
    if not field.lineno:
        return ""
    lines = field.lines_collection[field.filepath][field.lineno - 1 : field.endlineno]
    return " ".join(filter(None, (line.partition("  # ")[2] for line in lines)))


def _with_fields(owner: griffe.Class) -> str:
    """Return the documentation of a dataclass with its fields as parameters."""
    text = owner.docstring.value
    known = [owner.attributes.get(parameter.name) for parameter in owner.parameters]
    rows = [f"    {each.name}: {_comment(each)}" for each in known if each and _comment(each)]
    if not rows:
        return text
    end = _END.search(text).start()
    return "\n".join([text[:end].rstrip(), "", "Args:", *rows, "", text[end:]])


def _signature(match: re.Match[str]) -> str:
    plain = re.sub(r"kvcache\._core\.|typing\.SupportsInt \| |numpy\.typing\.", "", match[0])
    return f"```python\n{plain.replace('typing.SupportsIndex', 'int')}\n```\n"
