# SPDX-License-Identifier: Apache-2.0
"""Checks that includes of `csrc` only go downwards and are used."""

import re

from tests.machinery.shared import REPO

CSRC = REPO / "csrc"

# Maps each room to the rooms that it may include in addition to itself. Listed from the inside out.
MAY_INCLUDE = {
    "core": set(),
    "core/hashing": {"core"},
    "core/pool": {"core"},
    "core/groups": {"core", "core/hashing", "core/pool"},
    "core/eviction": {"core", "core/pool"},
    "core/listeners": {"core", "core/pool"},
    "core/manager":
        {*("core", "core/hashing", "core/pool", "core/groups", "core/eviction", "core/listeners")},
    "sanitizer": {"core"},
    "worker": set(),
    "ops": {"worker"},
    "python":
        {*("core", "core/hashing", "core/pool", "core/groups", "core/eviction", "core/manager"),
        *("core/listeners", "sanitizer", "worker")},
}  # fmt: skip
OUTSIDE = {"emul", "tests"}  # no product code; the emulator is in tools/cuda_emulator
# Files that only read members of a type, without naming it.
READS_MEMBERS = {("core/manager/prefix_finder.h", "core/groups/rules/page_rules.h")}

FILES = {
    path.relative_to(CSRC).as_posix(): path.read_text()
    for path in sorted(CSRC.rglob("*"))
    if path.suffix in {".h", ".cpp", ".cu"} and path.relative_to(CSRC).parts[0] not in OUTSIDE
}


def room_of(name: str) -> str:
    parts = name.split("/")
    return "/".join(parts[:2]) if parts[0] == "core" and len(parts) > 2 else parts[0]


def includes_of(name: str) -> list[str]:
    """Return the product files that a file includes."""
    included = re.findall(r'^#include "([^"]+)"', FILES[name], re.MULTILINE)
    return [each for each in included if room_of(each) not in OUTSIDE]


def names_declared(name: str) -> set[str]:
    """Return the names that a header declares: types, functions, constants and macros."""
    text = re.sub(r"//.*", "", FILES[name])
    patterns = (
        r"^#define (\w+)",
        r"\b(?:struct|class|enum class|enum|union) (?:alignas\(\d+\) )?(\w+)(?=[^;{}()]*\{)",
        r"\busing (\w+) =",
        r"\busing [\w:]+::(\w+);",
        r"constexpr [\w:<>, ]*?(\w+)\s*[={[]",
        r"^[\w:<>,*&\[\]() ]*?\b(\w+)\(",
    )
    return {found for each in patterns for found in re.findall(each, text, re.MULTILINE)}


def test_includes_go_downwards():
    order = list(MAY_INCLUDE)
    for room, allowed in MAY_INCLUDE.items():
        assert all(order.index(each) < order.index(room) for each in allowed), room
    for name in FILES:
        room = room_of(name)
        for included in includes_of(name):
            allowed = room_of(included) in MAY_INCLUDE[room] | {room}
            assert allowed, f"{name}: {room} may not include {included}"


def test_includes_contain_no_cycles():
    left = {name: set(includes_of(name)) - {name} for name in FILES}
    while free := [name for name, included in left.items() if not included & left.keys()]:
        for name in free:
            del left[name]
    assert not left, f"include cycle among {sorted(left)}"


def test_includes_are_used():
    for name, text in FILES.items():
        used = set(re.findall(r"\w+", re.sub(r"//.*|^#include.*", "", text, flags=re.MULTILINE)))
        own = name.rsplit(".", 1)[0] + ".h"
        for included in includes_of(name):
            if included != own and (name, included) not in READS_MEMBERS:
                assert names_declared(included) & used, f"{name} uses no name of {included}"
