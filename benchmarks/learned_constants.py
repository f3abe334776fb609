# SPDX-License-Identifier: Apache-2.0
"""What each constant of the eviction policy `learned` is worth.

    python -m benchmarks.learned_constants CONVERSATIONS AGENTS
    python -m benchmarks.learned_constants CONVERSATIONS AGENTS --write docs/eviction.md

Replays two traces in Mooncake's format, at three capacities each, with half and with twice the
value of each constant in csrc/core/eviction/learned/constants.h, and prints the geometric mean of
the ratios of the numbers of hits to those with the standard values. The policy runs in a plain pool
(learned_constants.cpp), which has the hits of `kvcache replay`. Needs a C++ compiler.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.eviction import markdown

REPO = Path(__file__).resolve().parents[1]
BLOCK = 512  # tokens
CAPACITIES = {"conversations": (1_000, 5_859, 10_000), "agents": (500, 2_000, 3_000)}  # blocks
CONSTANT = re.compile(r"inline constexpr (\w+) (k\w+) = ([^;]+);(?:\s*// (.*))?")


def convert(trace: Path, to: Path) -> None:
    """Write the trace in the format of learned_constants.cpp."""
    numbers: dict[int, int] = {}
    found, num_requests = [], 0
    with gzip.open(trace, "rt") if trace.suffix == ".gz" else trace.open() as file:
        for line in file:
            request = json.loads(line)
            ids = request["hash_ids"][: request["input_length"] // BLOCK]
            blocks = [numbers.setdefault(each, len(numbers)) for each in ids]
            times = request["timestamp"], request["input_length"], request["output_length"]
            found.append(np.array([*times, len(blocks), *blocks], np.int64))
            num_requests += 1
    with to.open("wb") as out:
        np.array([num_requests], np.int64).tofile(out)
        np.concatenate(found).tofile(out)


def compile_in(folder: Path) -> Path:
    """Compile the replay with constants that are read from the environment."""
    shutil.copytree(REPO / "csrc" / "core", folder / "core")
    path = folder / "core" / "eviction" / "learned" / "constants.h"
    text = CONSTANT.sub(r'inline const \1 \2 = static_cast<\1>(value("\2", \3));', path.read_text())
    value = """namespace kvcache::learned {
inline double value(const char* name, double standard) {
  const char* given = std::getenv(name);
  return given == nullptr ? standard : std::atof(given);
}
"""
    text = text.replace("namespace kvcache::learned {", value, 1)
    path.write_text(text.replace("#include <cstdint>", "#include <cstdint>\n#include <cstdlib>"))
    sources = [REPO / "benchmarks" / "learned_constants.cpp", folder / "core" / "prefault.cpp"]
    command = [*os.environ.get("CXX", "c++").split(), "-std=c++17", "-O2", "-I", folder]
    subprocess.run([*command, *sources, "-o", folder / "replay"], check=True)
    return folder / "replay"


def constants() -> dict[str, tuple[float, bool]]:
    """Return the value of each constant, and whether it is an integer."""
    path = REPO / "csrc" / "core" / "eviction" / "learned" / "constants.h"
    return {
        name: (eval(value.replace("'", "_")), kind != "double")  # such as `1. / 8`
        for kind, name, value, _ in CONSTANT.findall(path.read_text())
    }


def table(traces: dict[str, Path]) -> str:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        replay = compile_in(folder)
        for name, trace in traces.items():
            convert(trace, folder / name)

        def hits(name: str, environment: dict[str, str]) -> list[int]:
            sizes = map(str, CAPACITIES[name])
            command = [replay, folder / name, str(BLOCK), *sizes]
            environment = {**os.environ, **environment}
            done = subprocess.run(command, env=environment, capture_output=True, check=True)
            return [int(each) for each in done.stdout.split()]

        standard = {name: hits(name, {}) for name in traces}
        lines = [["constant", "value", *(f"{n}, {f}" for n in traces for f in ("half", "twice"))]]
        lines.append(["---"] * len(lines[0]))
        for constant, (value, is_integer) in constants().items():
            cells = [f"`{constant}`", f"{value:,g}"]
            for name in traces:
                for factor in (0.5, 2):
                    changed = max(int(value * factor), 1) if is_integer else value * factor
                    if constant.endswith("Ratio"):
                        changed = 1 + (value - 1) * factor
                    found = hits(name, {constant: repr(changed)})
                    ratios = [math.log(a / b) for a, b in zip(found, standard[name], strict=True)]
                    cells.append(f"{math.exp(sum(ratios) / len(ratios)):.3f}")
            lines.append(cells)
            print(*cells, flush=True)
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
        begin, end = "<!-- table: constants -->\n", "\n<!-- end -->"
        before, rest = options.write.read_text().split(begin)
        options.write.write_text(f"{before}{begin}\n{found}\n{end[1:]}{rest.split(end, 1)[1]}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
