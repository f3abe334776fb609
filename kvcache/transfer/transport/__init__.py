# SPDX-License-Identifier: Apache-2.0
"""Transports, which move bytes between the registered memory of two engines' processes."""
