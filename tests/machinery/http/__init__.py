# SPDX-License-Identifier: Apache-2.0
"""Tests a real `kvcache serve` process over sockets, with random requests of hostile clients."""
