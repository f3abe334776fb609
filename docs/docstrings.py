"""How `make docs` reads our docstrings: an extension of griffe.

- The `>>>` examples are shown as code.
- The comment at the end of a field's line is the field's documentation.
"""

from __future__ import annotations

import re

import griffe

# A paragraph that begins with a prompt.
_EXAMPLE = re.compile(r"(?:^|(?<=\n\n))>>> .*?(?=\n\n|\Z)", re.DOTALL)


class Docstrings(griffe.Extension):
    """Adds fences around examples, and the documentation of fields."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring:
            obj.docstring.value = _EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
        elif obj.is_attribute and obj.parent.is_class and obj.lineno:
            lines = obj.lines_collection[obj.filepath][obj.lineno - 1 : obj.endlineno]
            comments = [line.partition("  # ")[2] for line in lines]
            if any(comments):
                obj.docstring = griffe.Docstring(" ".join(filter(None, comments)), parent=obj)
