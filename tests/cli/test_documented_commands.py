# SPDX-License-Identifier: Apache-2.0
"""Every `kvcache` command and make target in the documentation is accepted."""

import re
import shlex

import pytest

from kvcache import cli
from tests.machinery.shared import REPO

PAGES = [REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted((REPO / "docs").glob("*.md"))]
PAGES += sorted((REPO / "packages").glob("*/README.md"))


def commands_of(page) -> list[str]:
    """Return the `kvcache` commands in the code blocks of a page, without comments."""
    text = page.read_text().replace("\\\n", " ")
    fenced = "\n".join(re.findall(r"^```(?:bash|sh)\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    indented = "\n".join(re.findall(r"^    (\S.*)$", text, re.MULTILINE))
    found = re.compile(r"^(?:\$ )?(?:[A-Z_]+=\S+ )*(kvcache [a-z].*)$", re.MULTILINE)
    lines = found.findall(f"{fenced}\n{indented}")
    return [line.partition(" #")[0].rstrip(" &") for line in lines]


COMMANDS = [(page.name, command) for page in PAGES for command in commands_of(page)]


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_documented_commands_are_accepted(page, command):
    _, unknown = cli._parser().parse_known_args(shlex.split(command)[1:])
    assert unknown == []


def test_commands_are_found():
    named = {shlex.split(command)[1] for _, command in COMMANDS}
    assert {"demo", "replay", "plan", "serve", "doctor"} <= named


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name + page.name)
def test_documented_make_targets_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", (REPO / "Makefile").read_text(), re.MULTILINE))
    for found in re.findall(r"(?:`|^    )make ([a-z-]+)", page.read_text(), re.MULTILINE):
        assert found in targets, found
