# SPDX-License-Identifier: Apache-2.0
"""Benchmarks.

Each benchmark also measures a baseline or a limit for comparison. See `python -m benchmarks
--help`.
"""
