# SPDX-License-Identifier: Apache-2.0
"""Tests the data plane on a device that is neither CPU nor CUDA.

Every part must work or raise a clear error.

`python -m tests.machinery.other_device [NAME...]` prints a matrix of every public name that holds or
moves tensors.
"""
