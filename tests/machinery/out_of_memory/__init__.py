# SPDX-License-Identifier: Apache-2.0
"""Fails each allocation of every public call.

The call must change nothing, or its object must report that it is broken.

`python -m tests.machinery.out_of_memory [name]` runs all cases, or those whose names start with `name`.
"""
