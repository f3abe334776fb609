# SPDX-License-Identifier: Apache-2.0
import collections
import sys

from tests.machinery.out_of_memory.cases import FAMILIES
from tests.machinery.out_of_memory.runner import IS_WRONG, run_cases, survey


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--child"]:
        family, first, first_n = arguments[1:]
        run_cases(FAMILIES[family](), int(first), int(first_n))
        return 0
    total = collections.Counter()
    for family, make_cases in FAMILIES.items():
        if arguments and not family.startswith(arguments[0]):
            continue
        for name, counts in survey(family, make_cases(), timeout_s=3600).items():
            print(f"{name}: {dict(counts)}", flush=True)
            total += counts
    print(f"{sum(total.values())} allocations that failed: {dict(total)}")
    return int(any(total[wrong] for wrong in IS_WRONG))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
