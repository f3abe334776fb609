# SPDX-License-Identifier: Apache-2.0
"""Makes each allocation in every public call fail, one at a time.

The failed call must change nothing, or its object must report that it is broken.

`python -m tests.machinery.out_of_memory [name]` runs all cases, or those whose names start with `name`.
"""
