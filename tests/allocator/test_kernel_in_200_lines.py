# SPDX-License-Identifier: Apache-2.0
"""docs/kernel_in_200_lines.py runs, and gives the same answers as the manager to random calls."""

import ast
import subprocess
import sys
from collections import Counter

import pytest

from tests.machinery.kernel_driver import KERNEL_PATH, drive, kernel
from tests.machinery.shared import sampled

NUM_SEEDS, SEEDS_PER_TEST = 160, 20  # 48,000 operations including exhaustive tests


def test_the_page_has_at_most_200_lines_and_imports_only_the_standard_library():
    text = KERNEL_PATH.read_text()
    assert len(text.splitlines()) <= 200
    imports = [each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.Import)]
    froms = [each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.ImportFrom)]
    assert not imports and froms
    assert all(each.module.partition(".")[0] in sys.stdlib_module_names for each in froms)


def test_the_example_of_the_page_shows_a_hit_and_a_swap():
    ran = subprocess.run([sys.executable, KERNEL_PATH], capture_output=True, text=True, check=True)
    plans = [line for line in ran.stdout.splitlines() if line.startswith("namespace")]
    assert len(plans) == 4 and not ran.stderr
    assert "answers=[('b', 8, 0)]" in plans[1]  # 8 of 9 tokens hit
    assert "swap_out=[(1, 1), (2, 2), (3, 3)]" in plans[2]
    assert "swap_in=[(1, 5), (2, 6), (3, 3)]" in plans[3]


@pytest.mark.slow
@pytest.mark.parametrize("first", sampled(range(0, NUM_SEEDS, SEEDS_PER_TEST)))
def test_random_operations_agree_with_the_manager(first):
    print(f"seeds {first} to {first + SEEDS_PER_TEST - 1}")
    seen = sum((drive(seed) for seed in range(first, first + SEEDS_PER_TEST)), Counter())
    of_interest = ("served", "wait", "never", "hit", "copy", "swap_out", "swap_in", "replace")
    assert all(seen[what] > 10 for what in of_interest), seen


# Planted defects, which the comparison must detect ---------------------------------------------------


def least_recent_of_all(tier):
    """Evict without sparing the only path to another block, as the device does."""
    tier.chain_size = 0
    return take(tier)


take = kernel.Tier.take
BREAKS = {
    "window": (kernel.Rules, "first_needed", lambda self, n: 0),
    "leaves": (kernel.Tier, "take", least_recent_of_all),
    "offload": (kernel.Manager, "on_change", lambda self, what, block: None),
    "report": (kernel.Manager, "report", lambda self, report: None),
    "hit": (kernel.Manager, "hit", lambda self, chain: []),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_defect_of_the_kernel_is_detected(name, monkeypatch):
    monkeypatch.setattr(*BREAKS[name])
    with pytest.raises((AssertionError, ValueError, IndexError)):
        for seed in range(40):
            drive(seed)
