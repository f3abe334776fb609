# SPDX-License-Identifier: Apache-2.0
"""Checks that the listed defects and mutants match the current code, so that they can be planted."""

import pytest

from tests.machinery.mutants import MUTANTS, SURVIVORS
from tests.machinery.planted_breaks import DEFECTS, Defect, problem

ALL = [*DEFECTS, *(Defect(*mutant) for mutant in MUTANTS)]


def test_names_are_unique():
    names = {each.name for each in ALL}
    assert len(names) == len(ALL) and set(SURVIVORS) <= names


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted({each.path for each in ALL}))
def test_planted_code_occurs_once_in_its_file(path):
    assert [problem(each) for each in ALL if each.path == path and problem(each)] == []
