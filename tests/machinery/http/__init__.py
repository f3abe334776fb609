# SPDX-License-Identifier: Apache-2.0
"""Tests a real `kvcache serve` process over sockets, with a fuzzer and with a storm of hostile
clients.
"""
