# SPDX-License-Identifier: Apache-2.0
"""python -m tests.machinery.other_device [NAME...] prints the matrix for a device that is neither CPU nor
CUDA.
"""

import sys

from tests.machinery.other_device.matrix import child, table


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--child"]:
        child(arguments[1:])
        return 0
    rows = table(arguments)
    width = max(len(row.name) for row in rows)
    for row in rows:
        print(f"{row.name:<{width}}  {row.outcome:<8}  {row.detail}".rstrip())
    return int(any(row.is_wrong for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
