# SPDX-License-Identifier: Apache-2.0
"""What each constant of the eviction policy `learned` is worth.

    python -m benchmarks.learned_constants CONVERSATIONS AGENTS
    python -m benchmarks.learned_constants CONVERSATIONS AGENTS --write docs/eviction.md

Replays two traces in Mooncake's format, at three capacities each, with half and with twice the
value of each constant in csrc/core/eviction/learned/constants.h, and prints the geometric mean of
the ratios of the hits to those with the standard values. Builds a copy of the package that reads the
constants from the environment. Takes about 20 minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.eviction import markdown, with_table
from benchmarks.gpu import machine, workspace
from tests.machinery import roots

CAPACITIES = {"conversations": (1_000, 5_859, 10_000), "agents": (500, 2_000, 3_000)}  # blocks
CONSTANTS = Path("csrc", "core", "eviction", "learned", "constants.h")
CONSTANT = re.compile(r"inline constexpr (\w+) (k\w+) = ([^;]+);(?:\s*// (.*))?")
# A constant's value: that of the environment variable of its name, if there is one.
_VALUE = """#include <cstdlib>

namespace kvcache::learned {
inline double value(const char* name, double standard) {
  const char* given = std::getenv(name);
  return given == nullptr ? standard : std::atof(given);
}
"""
_REPLAY = """
import json, sys
from pathlib import Path
from benchmarks.eviction import read, replayed
for path, capacities in json.loads(sys.argv[1]):
    requests = read(Path(path))
    for capacity in capacities:
        print(replayed(requests, capacity, "learned").hit_tokens)
"""


def build_in(folder: Path) -> None:
    """Build a copy of the package whose constants are read from the environment."""
    workspace.make(folder)
    path = folder / CONSTANTS
    text = CONSTANT.sub(r'inline const \1 \2 = static_cast<\1>(value("\2", \3));', path.read_text())
    path.write_text(text.replace("namespace kvcache::learned {\n", _VALUE, 1))
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(command, cwd=folder, env={**os.environ, "KVCACHE_CUDA": "0"}, check=True)


def constants() -> dict[str, tuple[float, bool]]:
    """Return the value of each constant, and whether it is an integer."""
    return {
        name: (eval(value.replace("'", "_")), kind != "double")  # such as `1. / 8`
        for kind, name, value, _ in CONSTANT.findall((machine.REPO / CONSTANTS).read_text())
    }


def hits(folder: Path, traces: dict[str, Path], changed: dict[str, str]) -> dict[str, list[int]]:
    """Return the hit tokens of each trace, by capacity, with these values of constants."""
    wanted = [(str(path.resolve()), CAPACITIES[name]) for name, path in traces.items()]
    environment = {**os.environ, "PYTHONPATH": roots.python_path(folder), **changed}
    command = [sys.executable, "-c", _REPLAY, json.dumps(wanted)]
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, check=True)
    found = iter(map(int, done.stdout.split()))
    return {name: [next(found) for _ in CAPACITIES[name]] for name in traces}


def table(traces: dict[str, Path]) -> str:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "tree")
        build_in(folder)
        standard = hits(folder, traces, {})
        lines = [["constant", "value", *(f"{n}, {f}" for n in traces for f in ("half", "twice"))]]
        lines.append(["---"] * len(lines[0]))
        for constant, (value, is_integer) in constants().items():
            columns: dict[str, list[str]] = {name: [] for name in traces}
            for factor in (0.5, 2):
                changed = max(int(value * factor), 1) if is_integer else value * factor
                if constant.endswith("Ratio"):
                    changed = 1 + (value - 1) * factor
                for name, found in hits(folder, traces, {constant: repr(changed)}).items():
                    ratios = [math.log(a / b) for a, b in zip(found, standard[name], strict=True)]
                    columns[name].append(f"{math.exp(sum(ratios) / len(ratios)):.3f}")
            lines.append(
                [f"`{constant}`", f"{value:,g}", *(x for each in columns.values() for x in each)]
            )
            print(*lines[-1], flush=True)
    return markdown(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learned_constants", description=__doc__.partition("\n")[0]
    )
    for name in CAPACITIES:
        parser.add_argument(name, type=Path, help="JSONL file in Mooncake's format")
    parser.add_argument("--write", type=Path, metavar="FILE", help="replace the table in this file")
    options = parser.parse_args()
    found = table({name: getattr(options, name) for name in CAPACITIES})
    if options.write:
        options.write.write_text(with_table(options.write.read_text(), "constants", found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
