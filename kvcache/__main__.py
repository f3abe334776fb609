# SPDX-License-Identifier: Apache-2.0
"""Run the command line with `python -m kvcache`."""

import sys

from kvcache.cli import main

if __name__ == "__main__":
    sys.exit(main())
