# SPDX-License-Identifier: Apache-2.0
"""Checks the API key of a request."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Annotated

from fastapi import Depends
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from kvcache_serve.server.errors import AskError

_Bearer = Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]


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
