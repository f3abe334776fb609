# SPDX-License-Identifier: Apache-2.0
"""Compiles every CUDA source with nvcc and checks the machine code for ARCHS. Requires no GPU.

Prints a table of each kernel entry's machine code, and fails if it does not match
`sass_expectations.py`. Register spills are treated as assembler errors on every architecture.
`--json FOLDER` writes the tables to FOLDER/sass_ARCH.json. Checking the machine code requires
c++filt and cuobjdump. cuobjdump is taken from $CUOBJDUMP, the toolkit, PATH, or triton (installed
here or in the environment of `make gpu-less`). If either tool is missing, this check is skipped
with a message.

Exit codes: 0 if everything matches, 1 if something differs, 3 if nvcc is not found.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from benchmarks import sass
from benchmarks.gpu.machine import write_results
from benchmarks.sass_expectations import failures
from kvcache.native import build
from tests.machinery.gpu_less.build import environment_folder
from tests.machinery.gpu_less.limits import find_cuobjdump

NO_NVCC = 3
ARCHS = ("sm_90", "sm_100")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--json", type=Path, metavar="FOLDER", help="write the tables to this folder"
    )
    json_folder = parser.parse_args(arguments).json
    home = build.cuda_home()
    if home is None:
        print("cuda-check: no nvcc found, nothing compiled", file=sys.stderr)
        return NO_NVCC
    root = build.source_root()
    sources = build.cuda_sources(root)
    with tempfile.TemporaryDirectory() as folder:
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]
        with ThreadPoolExecutor() as pool:
            results = list(pool.map(lambda s, o: compile_one(home, root, s, o), sources, objects))
        for source, result in zip(sources, results, strict=True):
            print(f"{source.name}: {'ok' if result.returncode == 0 else 'FAILED'}")
            sys.stderr.write(result.stderr)
        if any(result.returncode for result in results):
            return 1
        return max(check_machine_code(home, objects, arch, json_folder) for arch in ARCHS)


def compile_one(
    home: Path, root: Path, source: Path, target: Path
) -> subprocess.CompletedProcess[str]:
    command = [
        str(home / "bin" / "nvcc"),
        *build.NVCC_FLAGS,
        *build.gencode_flags(),
        "-Werror=all-warnings",
        "-Xptxas=--warn-on-spills,--warning-as-error",
        f"-D{build.TORCH_TARGET}",
        "-isystem",
        str(build.torch_dir() / "include"),
        f"-I{root}",
        "-c",
        str(source),
        "-o",
        str(target),
    ]
    return subprocess.run(command, capture_output=True, text=True)


def check_machine_code(home: Path, objects: list[Path], arch: str, json_folder: Path | None) -> int:
    tool = find_cuobjdump(home, environment_folder())
    missing = None
    if f"code={arch}" not in " ".join(build.gencode_flags()):
        missing = f"this build does not include {arch}"
    elif tool is None:
        missing = "no cuobjdump found"
    elif shutil.which("c++filt") is None:
        missing = "no c++filt found"
    if missing is not None:
        print(f"machine code of {arch}: SKIPPED, {missing}")
        return 0
    files = {o.stem: disassembled(tool, o, arch) for o in objects}
    print(f"\nmachine code of {arch}:")
    for name, figures in files.items():
        if figures:
            print_table(name, figures)
    if json_folder is not None:
        rows = [{"file": file, **asdict(f)} for file, figures in files.items() for f in figures]
        contents = {"arch": arch, **made_with(home), "kernels": rows}
        write_results(json_folder / f"sass_{arch}.json", contents)
    found = failures((f for figures in files.values() for f in figures), arch=arch)
    for line in found:
        print(f"machine code of {arch}: FAILED, {line}", file=sys.stderr)
    if not found:
        print(f"machine code of {arch}: as expected")
    return int(bool(found))


def disassembled(tool: str, file: Path, arch: str) -> list[sass.Figures]:
    def output(option: str) -> str:
        return subprocess.run(
            [tool, option, "-arch", arch, str(file)], capture_output=True, text=True, check=True
        ).stdout

    kernels = sass.parse(output("-sass"), output("-res-usage"))
    if not kernels:  # a source without kernels is valid, but a missing expected kernel is an error
        return []
    names = sass.demangled([kernel.symbol for kernel in kernels])
    found = [sass.figures(kernel, name) for kernel, name in zip(kernels, names, strict=True)]
    return sorted(found, key=lambda f: f.kernel)


def print_table(file: str, figures: list[sass.Figures]) -> None:
    """Print one line per kernel. Entries that differ only in their names share a line."""
    columns = ("registers", "local", "shared", "instr.", "loads in flight", "stores", "instr./16 B")
    widths = (9, 5, 6, 6, 17, 14, 11)
    heading = "  ".join(f"{column:>{width}}" for column, width in zip(columns, widths, strict=True))
    print(f"\n{file + '.cu':46}{heading}")

    def cells(f: sass.Figures) -> tuple[str, ...]:
        return (
            str(f.registers),
            str(f.stack_bytes + f.local_bytes + f.local_accesses),
            str(f.shared_bytes),
            str(f.instructions),
            by_width(f.loads_in_flight),
            by_width(f.stores),
            "-" if f.instructions_per_16_bytes is None else str(f.instructions_per_16_bytes),
        )

    alike: dict[tuple, list[str]] = {}
    for f in figures:
        alike.setdefault((f.kernel.split("<")[0], cells(f)), []).append(f.kernel)
    for (_, shown), names in alike.items():
        line = "  ".join(f"{cell:>{width}}" for cell, width in zip(shown, widths, strict=True))
        for name in names[:-1]:
            print(name)
        print(f"{names[-1]:46}{line}" if len(names[-1]) < 46 else f"{names[-1]}\n{'':46}{line}")


def by_width(numbers: dict[int, int]) -> str:
    """Format counts by width: 8 of 16 bytes and 2 of 4 bytes become "8x16 2x4"."""
    return " ".join(f"{n}x{width}" for width, n in sorted(numbers.items(), reverse=True)) or "-"


def made_with(home: Path) -> dict[str, str]:
    version = subprocess.run(
        [str(home / "bin" / "nvcc"), "--version"], capture_output=True, text=True
    ).stdout
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
    ).stdout.strip()
    line = next((line for line in version.splitlines() if "release" in line), "")
    return {"nvcc": line.rpartition(" ")[2], "commit": commit}


if __name__ == "__main__":
    sys.exit(main())
