# SPDX-License-Identifier: Apache-2.0
"""All cases, keyed by family. Each family runs in a separate process."""

from __future__ import annotations

from tests.machinery.out_of_memory.managers import manager_families
from tests.machinery.out_of_memory.others import other_families
from tests.machinery.out_of_memory.pools import pool_cases
from tests.machinery.out_of_memory.sequences import sequence_cases
from tests.machinery.out_of_memory.workers import worker_cases

FAMILIES = {
    **manager_families(),
    "block pool": pool_cases,
    "block space manager": sequence_cases,
    "worker": worker_cases,
    **other_families(),
}
