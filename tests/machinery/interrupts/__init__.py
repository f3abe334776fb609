# SPDX-License-Identifier: Apache-2.0
"""Tests signal handlers that raise at any instant during any call.

Python and the native code must always agree on each request's state. `python -m
tests.machinery.interrupts --count 10000` tries random instants.
"""
