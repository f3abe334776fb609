# SPDX-License-Identifier: Apache-2.0
"""Block management for groups of sequences, which are objects of the engine."""
