# SPDX-License-Identifier: Apache-2.0
"""Checks the API key of a server and of its requests."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Annotated

from fastapi import Depends
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from kvcache_serve.server.errors import AskError

_Bearer = Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]


def check_key(value: str, name: str) -> None:
    """Raise TypeError or ValueError, without the value, unless it is a key that a header can carry."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is a {type(value).__name__}: expected a string")
    if not value or value != value.strip() or not (value.isascii() and value.isprintable()):
        raise ValueError(f"{name}: expected printable ASCII characters, without spaces at the ends")


def key_check(
    api_key: str, name: str = "the API key", source: str = "the server's --api-key"
) -> Callable[[_Bearer], None]:
    """Return a FastAPI dependency that rejects requests without this key.

    The error message states how to pass the key and where it was configured, but does not contain
    the received key.
    """
    expected = api_key.encode()

    def check(given: _Bearer) -> None:
        # `compare_digest` takes the same time for every key, which prevents timing attacks.
        if given is None or not hmac.compare_digest(given.credentials.encode(), expected):
            came = "missing" if given is None else "wrong"
            raise AskError(
                f"{name} is {came}: expected the header 'Authorization: Bearer KEY', with {source}",
                401,
                {"www-authenticate": "Bearer"},
            )

    return check
