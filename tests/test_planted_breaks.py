"""The lists of planted defects and mutants fit the code: each names text that stands once in its file."""

import pytest

from tests.mutants import MUTANTS, SURVIVORS
from tests.planted_breaks import DEFECTS
from tests.shared import REPO

CHANGES = [(each.name, each.path, each.old, each.new, each.tests) for each in DEFECTS] + MUTANTS


def test_names_are_unique():
    names = [name for name, *_ in CHANGES]
    assert len(set(names)) == len(names)
    assert set(SURVIVORS) <= set(names)


@pytest.mark.parametrize("path", sorted({path for _, path, *_ in CHANGES}))
def test_what_is_changed_stands_once_in_its_file(path):
    text = (REPO / path).read_text()
    for name, where, old, new, _ in CHANGES:
        if where == path:
            assert text.count(old) == 1 and old != new, name


def test_the_tests_that_are_to_notice_exist():
    files = {name for *_, tests in CHANGES for name in tests.split()}
    assert [name for name in sorted(files) if not (REPO / f"tests/test_{name}.py").is_file()] == []
