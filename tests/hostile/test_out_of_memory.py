# SPDX-License-Identifier: Apache-2.0
"""Makes memory allocations fail in every public call.

The object's state must then be unchanged, or the object must report that it is broken.

`python -m tests.machinery.out_of_memory` runs all cases and prints counts.
"""

import pytest

from tests.machinery.out_of_memory.cases import FAMILIES
from tests.machinery.out_of_memory.runner import BROKEN_SAID, IS_WRONG, UNCHANGED, survey
from tests.machinery.shared import sampled


@pytest.mark.slow
@pytest.mark.parametrize("family", sampled(FAMILIES, 1))
def test_failed_allocation_changes_nothing_or_breaks_the_object_visibly(family, capsys):
    counts = survey(family, FAMILIES[family](), timeout_s=240)
    wrong = {name: each for name, each in counts.items() if any(each[kind] for kind in IS_WRONG)}
    assert not wrong, capsys.readouterr().out
    total = sum(counts.values(), start=type(next(iter(counts.values())))())
    assert total[UNCHANGED] and total[UNCHANGED] + total[BROKEN_SAID] == total.total()
