# SPDX-License-Identifier: Apache-2.0
"""Benchmarks, each beside a baseline or a limit. See `python -m benchmarks --help`."""
