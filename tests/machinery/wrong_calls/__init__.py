# SPDX-License-Identifier: Apache-2.0
"""Fuzzes public calls with random invalid and hostile arguments: `python -m
tests.machinery.wrong_calls`.
"""
