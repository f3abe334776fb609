# SPDX-License-Identifier: Apache-2.0
"""Right calls of everything public, and the wrong ones derived from them: `python -m
tests.machinery.hostile wrong|memory|interrupts|engine|device`.
"""
