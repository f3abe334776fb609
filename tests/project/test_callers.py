# SPDX-License-Identifier: Apache-2.0
"""Checks that every public name and option of the kernel has a user.

A user is product code outside the definition, native code that calls the name, or code in an
example or in the documentation (except the reference, which lists everything).
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.machinery.shared import REPO

PRODUCT = [REPO / "setup.py", REPO / "kvcache", *REPO.glob("packages/*/src")]
KERNEL = {
    *("checks", "specs", "layouts", "placement", "memory_plan", "step", "events", "ops"),
    *("ops_by_copies", "assembly", "metrics", "extensions", "lazy", "allocator", "worker"),
    *("transfer", "native", "kinds", "sanitizer", "formats"),
}

Place = tuple[Path, int]


class Public(NamedTuple):
    """A public name or option, and the lines that define it."""

    name: str
    qualified: str
    file: Path
    first: int
    last: int

    def is_used(self, places: set[Place]) -> bool:
        """Return whether any of the places is outside the definition."""
        return any(
            file != self.file or not self.first <= line <= self.last for file, line in places
        )


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for root in PRODUCT:
        for file in sorted(root.rglob("*.py")) or [root]:
            yield file, ast.parse(file.read_text())


def is_kernel(file: Path) -> bool:
    parts = file.relative_to(REPO).with_suffix("").parts
    return parts[0] == "kvcache" and parts[1] in KERNEL and "transport" not in parts


def uses() -> tuple[dict[str, set[Place]], dict[str, set[Place]]]:
    """Return where product code uses each name, and where it passes each keyword."""
    names: dict[str, set[Place]] = defaultdict(set)
    keywords: dict[str, set[Place]] = defaultdict(set)
    for file, tree in sources():
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(attr=name) | ast.Name(id=name):
                    names[name].add((file, node.lineno))
                case ast.ImportFrom() if file.name != "__init__.py":
                    for each in node.names:
                        names[each.name].add((file, node.lineno))
                case ast.Constant(value=str(name)) if file.name != "__init__.py":
                    names[name].add((file, node.lineno))
                    keywords[name].add((file, node.lineno))
                case ast.keyword(arg=str(name)):
                    keywords[name].add((file, node.lineno))
                    names[name].add((file, node.lineno))
    return names, keywords


def words_of_documents() -> set[str]:
    """Return the words in the code of documents and examples, and in native code's strings."""
    documents = [REPO / "README.md", *(REPO / "docs").glob("*.md")]
    code = [
        found
        for file in documents
        for found in re.findall(r"```[^`]*```|`[^`\n]+`|^ {4,}.*$", file.read_text(), re.M)
    ]
    code += [file.read_text() for file in (REPO / "examples").rglob("*.py")]
    for file in (REPO / "csrc/python").iterdir():
        code += re.findall(r'"\w+"', file.read_text())
    return set(re.findall(r"\w+", " ".join(code)))


def is_public(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")


def members(file: Path, tree: ast.Module) -> Iterator[tuple[Public, ast.FunctionDef | None]]:
    """Yield the module's public functions, classes and methods. Constructors have no name."""

    def public(node: ast.AST, name: str, owner: str = "") -> Public:
        first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
        module = ".".join(file.relative_to(REPO).with_suffix("").parts)
        return Public(name, f"{module}.{owner}{node.name}", file, first, node.end_lineno)

    for node in filter(is_public, tree.body):
        is_function = isinstance(node, ast.FunctionDef)
        is_registered = any(isinstance(each, ast.Name | ast.Call) for each in node.decorator_list)
        name = "" if is_registered and not is_function else node.name
        yield public(node, name), node if is_function else None
        for each in [] if is_function else node.body:
            if is_public(each):
                yield public(each, each.name, f"{node.name}."), each
            elif isinstance(each, ast.FunctionDef) and each.name == "__init__":
                yield public(each, "", f"{node.name}."), each


def unused() -> list[str]:
    """Return the qualified names of public names and options without a user."""
    names, keywords = uses()
    words = words_of_documents()
    found = []
    for file, tree in sources():
        if not is_kernel(file):
            continue
        for public, function in members(file, tree):
            if public.name and public.name not in words and not public.is_used(names[public.name]):
                found.append(public.qualified)
            if function is None:
                continue
            arguments = zip(function.args.kwonlyargs, function.args.kw_defaults)
            for option in [each.arg for each, default in arguments if default is not None]:
                if option not in words and not public.is_used(keywords[option]):
                    found.append(f"{public.qualified}({option})")
    return found


def test_every_public_name_and_option_of_the_kernel_has_a_user():
    assert unused() == []
