# SPDX-License-Identifier: Apache-2.0
"""The index mathematics is proved, and what is proved is what is compiled."""

import ctypes
import random
import subprocess

import pytest

from kvcache.native import build
from tests.machinery.compilers import cxx
from tests.machinery.shared import REPO, sampled, seed_of_test

pytest.importorskip("z3", reason="z3-solver is missing: THE INDEX MATHEMATICS IS NOT PROVED")

from tests.machinery import proofs

PROGRAM = """
#include "worker/slot_formula.h"
using namespace kvcache;
struct Permute {
  FastDivisor run, columns;
  uint32_t matrix_rows;
  uint32_t source(uint32_t r) const { SOURCE }
};
extern "C" int64_t divide(int64_t d, int64_t n) { return fast_divisor(d).divide(n); }
extern "C" int64_t slot(const int64_t* fields, const int32_t* row, int64_t position) {
  return table_view(fields).slot(row, position);
}
extern "C" int64_t source(int64_t run, int64_t columns, int64_t rows, int64_t r) {
  return Permute{fast_divisor(run), fast_divisor(columns), uint32_t(rows)}.source(r);
}
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", [each for each in proofs.NAMES if each != "division"])
def test_theorem(name):
    assert proofs.proved(name) > 0


@pytest.mark.exhaustive
def test_theorem_division():
    assert proofs.proved("division") > 0


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("proofs")
    body = proofs.body_of(proofs.PERMUTE, "source")[1]
    (folder / "index.cpp").write_text(PROGRAM.replace("SOURCE", body))
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-I", str(REPO / "csrc")]
    command = [cxx(build), *flags, str(folder / "index.cpp"), "-o", str(folder / "index.so")]
    subprocess.run(command, check=True)
    found = ctypes.CDLL(str(folder / "index.so"))
    for name in ("divide", "slot", "source"):
        getattr(found, name).restype = ctypes.c_int64
    return found


def arguments(*values: int) -> list[ctypes.c_int64]:
    return [ctypes.c_int64(value) for value in values]


def test_translations_agree_with_compiled_code(library):
    choose = random.Random(seed_of_test())
    make = proofs.translated(proofs.DIVISOR, "fast_divisor")
    for _ in range(300):
        d, n = (choose.randrange(2 ** choose.randint(1, 31)) for _ in range(2))
        divisor, magic, shift = make(max(d, 1))
        divide = proofs.translated(proofs.DIVISOR, "divide", magic=magic, shift=shift)
        assert divide(n) == library.divide(*arguments(divisor, n)) == n // divisor


def test_translated_slots_agree_with_compiled_code(library):
    choose = random.Random(seed_of_test())
    for _ in range(300):
        interleave, of_block = (choose.randint(1, 2 ** choose.randint(0, 6)) for _ in range(2))
        world, columns = choose.randint(1, 9), choose.randint(1, 50)
        rank, size = choose.randrange(world), interleave * of_block
        fields = (ctypes.c_int64 * 8)(0, columns, size, world, rank, interleave, 0, 0)
        row = [choose.randint(-1, 2**31 - 1) for _ in range(columns)]
        position = choose.randrange(columns * size * world)
        sizes = {"by_column": size * world, "by_interleave": interleave, "by_world": world}
        slot = proofs.translated(proofs.SLOTS, "slot", **sizes, rank=rank, block_size=size)
        compiled = library.slot(fields, (ctypes.c_int32 * columns)(*row), *arguments(position))
        assert slot(row, position) == compiled


def test_translated_permutations_agree_with_compiled_code(library):
    choose = random.Random(seed_of_test())
    for _ in range(100):
        run, columns, rows = (choose.randint(1, 60) for _ in range(3))
        names = {"run": run, "columns": columns, "matrix_rows": rows}
        source = proofs.translated(proofs.PERMUTE, "source", **names)
        found = [source(r) for r in range(run * columns * rows)][:: max(columns, 7)]
        wanted = range(0, run * columns * rows, max(columns, 7))
        assert found == [library.source(*arguments(run, columns, rows, r)) for r in wanted]


BREAKS = {
    "slots": ("round * by_interleave.divisor +", "chunk * by_interleave.divisor +"),
    "inverse_of_slots": ("chunk - round * by_world.divisor != rank", "chunk != rank"),
    "permutation": ("(j * matrix_rows + i)", "(j * matrix_rows + j)"),
    "division": ("31 + bits", "30 + bits"),
    "kernel_blocks": ("ids[i] * ratio + k", "ids[i] * ratio - k"),
    "pages_of_slots": ("int64_t{block} * block_stride + ", ""),
    "pages_of_copies": ("page * r.destination_stride", "(page + 1) * r.destination_stride"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(BREAKS, 2))
def test_a_wrong_formula_is_not_proved(name, monkeypatch):
    read = proofs.text_of
    right, wrong = BREAKS[name]
    monkeypatch.setattr(proofs, "text_of", lambda path: read(path).replace(right, wrong))
    with pytest.raises(AssertionError, match="is false"):
        proofs.proved(name)
