# SPDX-License-Identifier: Apache-2.0
"""Transports, which move bytes of registered memory between the processes of two engines."""
