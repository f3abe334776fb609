# SPDX-License-Identifier: Apache-2.0
"""Memory allocations that fail in every call: the object's state is then unchanged, or the object
reports that it is broken.

`python -m tests.machinery.hostile memory` runs all scenes and public calls, and prints counts.
"""

import collections

import pytest

from tests.machinery.hostile.out_of_memory import BROKEN_SAID, UNCHANGED, survey
from tests.machinery.hostile.scenes import SCENES
from tests.machinery.shared import sampled


@pytest.mark.slow
@pytest.mark.parametrize("scene", sampled([*SCENES, "kvcache."]))
def test_failed_allocation_changes_nothing_or_breaks_the_object_visibly(scene, capsys):
    counts = survey(scene)
    total = sum(counts.values(), start=collections.Counter())
    assert {*total} <= {UNCHANGED, BROKEN_SAID}, capsys.readouterr().out
    assert total[UNCHANGED]
