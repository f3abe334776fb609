# SPDX-License-Identifier: Apache-2.0
"""Benchmarks, each of which also measures a peer or a limit. See `python -m benchmarks --help`."""
