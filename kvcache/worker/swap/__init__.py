# SPDX-License-Identifier: Apache-2.0
"""Copies pages between device and host during computation, and benchmarks these copies."""
