# SPDX-License-Identifier: Apache-2.0
"""Benchmarks that measure a peer or a limit in the same run. See `python -m benchmarks --help`."""
