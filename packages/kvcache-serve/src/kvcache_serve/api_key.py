# SPDX-License-Identifier: Apache-2.0
"""Checks the API key that a server is given. Needs no web framework."""

from __future__ import annotations


def check_key(value: str, name: str) -> None:
    """Raise TypeError or ValueError, without the value, unless it is a key that a header can carry."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is a {type(value).__name__}: expected a string")
    if not value or value != value.strip() or not (value.isascii() and value.isprintable()):
        raise ValueError(f"{name}: expected printable ASCII characters, without spaces at the ends")
